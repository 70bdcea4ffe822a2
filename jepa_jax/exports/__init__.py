"""Encoders and features out of a run: exported models with their cards, and the features of folders of images."""
