"""Runs `jepa-jax lr-search`."""

import sys

from jepa_jax.cli.studies import LR_SEARCH

if __name__ == "__main__":
    sys.exit(LR_SEARCH.main())
