"""Runs `jepa-jax train`."""

import sys

from jepa_jax.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
