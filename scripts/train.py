"""Runs `jepa-jax train`."""

import sys

from jepa_jax.cli.train import main

if __name__ == "__main__":
    sys.exit(main())
