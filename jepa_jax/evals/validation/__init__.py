"""Figures of what is held out of training, for any method."""
