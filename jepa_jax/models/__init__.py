"""Encoders, heads and their building blocks: pure modules without training knowledge."""
