"""Runs `jepa-jax lr-search`."""

import sys

from jepa_jax.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["lr-search", *sys.argv[1:]]))
