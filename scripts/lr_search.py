"""Runs `jepa-jax lr-search`."""

from jepa_jax.cli.main import program

if __name__ == "__main__":
    program("lr-search")
