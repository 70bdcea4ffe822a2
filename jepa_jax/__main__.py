"""Runs the command `jepa-jax` as `python -m jepa_jax`."""

import sys

from jepa_jax.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
