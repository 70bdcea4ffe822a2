"""Runs `jepa-jax describe`."""

import sys

from jepa_jax.cli.configs import DESCRIBE

if __name__ == "__main__":
    sys.exit(DESCRIBE.main())
