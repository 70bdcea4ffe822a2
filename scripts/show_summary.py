"""Runs `jepa-jax show-summary`."""

from jepa_jax.cli.main import program

if __name__ == "__main__":
    program("show-summary")
