"""Where the time and the memory go."""
