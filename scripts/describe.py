"""Runs `jepa-jax describe`."""

import sys

from jepa_jax.cli.describe import main

if __name__ == "__main__":
    sys.exit(main())
