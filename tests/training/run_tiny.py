"""Trains the tiny config in a process of its own: run_tiny.py WORKDIR MARKER.

Shows each progress bar as a line, and waits for a signal when a line begins with MARKER.
"""

import pathlib
import signal
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))

from jepa_jax.base.console import Console
from jepa_jax.base.signals import Interrupted
from jepa_jax.training.run import train
from tests.tiny import tiny_config


class Waiting(Console):
    def line(self, text: str) -> None:
        handler, deadline = signal.getsignal(signal.SIGTERM), time.monotonic() + 1200
        super().line(text)
        # The first signal puts the former handlers back.
        while text.startswith(sys.argv[2]) and signal.getsignal(signal.SIGTERM) == handler:
            assert time.monotonic() < deadline, "no signal came"
            time.sleep(0.01)

    def start(self, what: str, total: int, done: int = 0) -> None:
        self.line(f"bar: {what}")


if __name__ == "__main__":
    try:
        train(tiny_config(mesh__data=1), sys.argv[1], console=Waiting())
    except Interrupted as stop:
        sys.exit(stop.exit_code)
