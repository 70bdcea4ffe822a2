"""Runs `jepa-jax compare-profiles`."""

import sys

from jepa_jax.cli.runs import COMPARE_PROFILES

if __name__ == "__main__":
    sys.exit(COMPARE_PROFILES.main())
