"""Runs `jepa-jax describe`."""

import sys

from jepa_jax.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["describe", *sys.argv[1:]]))
