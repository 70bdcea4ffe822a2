"""Runs `jepa-jax sweep`."""

from jepa_jax.cli.main import program

if __name__ == "__main__":
    program("sweep")
