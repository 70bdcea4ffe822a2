"""Readers of data in files: one module per format."""
