"""The sub-commands of `jepa-jax`: flags in, one call, an exit code out."""
