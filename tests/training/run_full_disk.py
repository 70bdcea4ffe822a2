"""Trains the tiny config on a disk that fills up: run_full_disk.py WORKDIR FILL FREE TERM.

Fills the disk when a line begins with FILL, frees it at FREE, and sends SIGTERM to itself at TERM; "-" means never.
"""

import contextlib
import os
import pathlib
import signal
import sys
from collections.abc import Callable

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))

import jepa_jax
from jepa_jax.base.console import Console
from jepa_jax.cli.command import Command, Result
from tests.tiny import tiny_config


class Filling(Console):
    filler = pathlib.Path(sys.argv[1]).parent / "filler"

    def line(self, text: str) -> None:
        super().line(text)
        fill, free, term = sys.argv[2:]
        if text.startswith(fill):
            self.filler.touch()
            self.advance()
        if text.startswith(free):
            self.filler.unlink()
        if text.startswith(term):
            os.kill(os.getpid(), signal.SIGTERM)

    def advance(self, amount: int = 1, note: Callable[[], str] | None = None) -> None:
        """Fills, after each step, what the run has freed."""
        if self.filler.exists():
            with contextlib.suppress(OSError), open(self.filler, "ab", buffering=0) as file:
                while True:
                    file.write(bytes(4096))


def run(arguments, console):
    config = tiny_config(mesh__data=1, optim__epochs=4.0, log__tensorboard=True, log__pictures_every_epochs=1)
    return Result([jepa_jax.train(config, sys.argv[1], resume="auto", console=Filling())], "")


if __name__ == "__main__":
    sys.exit(Command("full disk", __doc__, lambda parser: None, run).main([]))
