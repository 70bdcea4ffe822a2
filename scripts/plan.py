"""Runs `jepa-jax plan`."""

from jepa_jax.cli.main import program

if __name__ == "__main__":
    program("plan")
