"""Runs `jepa-jax compare-profiles`."""

from jepa_jax.cli.main import program

if __name__ == "__main__":
    program("compare-profiles")
