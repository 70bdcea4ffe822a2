"""Runs `jepa-jax prepare-data`."""

import sys

from jepa_jax.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["prepare-data", *sys.argv[1:]]))
