"""Methods that learn from sequences."""
