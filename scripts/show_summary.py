"""Runs `jepa-jax show-summary`."""

import sys

from jepa_jax.cli.show_summary import main

if __name__ == "__main__":
    sys.exit(main())
