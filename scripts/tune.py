"""Runs `jepa-jax tune`."""

import sys

from jepa_jax.cli.tune import main

if __name__ == "__main__":
    sys.exit(main())
