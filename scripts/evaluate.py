"""Runs `jepa-jax evaluate`."""

import sys

from jepa_jax.cli.evaluate import main

if __name__ == "__main__":
    sys.exit(main())
