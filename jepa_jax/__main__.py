"""Runs the command `jepa-jax` as `python -m jepa_jax`."""

from jepa_jax.cli.main import program

if __name__ == "__main__":
    program()
