"""Runs `jepa-jax compare`."""

import sys

from jepa_jax.cli.runs import COMPARE

if __name__ == "__main__":
    sys.exit(COMPARE.main())
