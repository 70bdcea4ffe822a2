"""Runs `jepa-jax train`."""

from jepa_jax.cli.main import program

if __name__ == "__main__":
    program("train")
