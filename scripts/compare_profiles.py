"""Runs `jepa-jax compare-profiles`."""

import sys

from jepa_jax.cli.compare_profiles import main

if __name__ == "__main__":
    sys.exit(main())
