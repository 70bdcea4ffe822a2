"""Runs `jepa-jax prepare-data`."""

from jepa_jax.cli.main import program

if __name__ == "__main__":
    program("prepare-data")
