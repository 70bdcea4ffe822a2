"""Runs `jepa-jax scale-guide`."""

import sys

from jepa_jax.cli.scale_guide import main

if __name__ == "__main__":
    sys.exit(main())
