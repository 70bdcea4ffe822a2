"""Training: one loop for every method, and what happens between its steps."""
