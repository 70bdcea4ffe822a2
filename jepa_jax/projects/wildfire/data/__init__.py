"""Wildfires: histories of fire masks with wind and terrain, and the mask that follows."""
