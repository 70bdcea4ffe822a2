"""Runs `jepa-jax plan`."""

import sys

from jepa_jax.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["plan", *sys.argv[1:]]))
