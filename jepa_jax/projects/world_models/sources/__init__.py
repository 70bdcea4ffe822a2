"""Sources of sequences."""
