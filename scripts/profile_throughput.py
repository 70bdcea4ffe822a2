"""Runs `jepa-jax sweep`."""

import sys

from jepa_jax.cli.sweep import main

if __name__ == "__main__":
    sys.exit(main())
