"""Runs `jepa-jax tune`."""

from jepa_jax.cli.main import program

if __name__ == "__main__":
    program("tune")
