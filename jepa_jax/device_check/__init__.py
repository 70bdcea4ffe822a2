"""What only a device can tell: parts of `jepa-jax check-gpu`, each of which runs in a process of its own."""
