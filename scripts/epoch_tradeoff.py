"""Runs `jepa-jax tradeoff`."""

import sys

from jepa_jax.cli.studies import TRADEOFF

if __name__ == "__main__":
    sys.exit(TRADEOFF.main())
