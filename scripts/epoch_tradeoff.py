"""Runs `jepa-jax tradeoff`."""

import sys

from jepa_jax.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["tradeoff", *sys.argv[1:]]))
