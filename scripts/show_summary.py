"""Runs `jepa-jax show-summary`."""

import sys

from jepa_jax.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["show-summary", *sys.argv[1:]]))
