"""Runs `jepa-jax compare-profiles`."""

import sys

from jepa_jax.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["compare-profiles", *sys.argv[1:]]))
