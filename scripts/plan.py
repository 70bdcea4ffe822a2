"""Runs `jepa-jax plan`."""

import sys

from jepa_jax.cli.plan import main

if __name__ == "__main__":
    sys.exit(main())
