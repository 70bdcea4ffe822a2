"""Where the time and memory of a run go."""
