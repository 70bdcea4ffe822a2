"""Runs `jepa-jax show-summary`."""

import sys

from jepa_jax.cli.runs import SHOW_SUMMARY

if __name__ == "__main__":
    sys.exit(SHOW_SUMMARY.main())
