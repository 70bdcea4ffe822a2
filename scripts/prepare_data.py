"""Runs `jepa-jax prepare-data`."""

import sys

from jepa_jax.cli.prepare_data import main

if __name__ == "__main__":
    sys.exit(main())
