"""Evaluations of frozen features: arrays in, figures out."""
