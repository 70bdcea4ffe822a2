"""Runs of the tiny config, for tests that look at what a run does and leaves."""

import json
import os
import pathlib
from collections.abc import Callable
from typing import Any

from jepa_jax.base.console import Console
from jepa_jax.train.run import train
from tests.tiny import tiny_config


class Silent(Console):
    """Remembers lines, warnings and the names of progress bars; calls `on_text` with each of them."""

    def __init__(self, on_text: Callable[[str], None] = lambda text: None):
        super().__init__(open(os.devnull, "w"))
        self.lines: list[str] = []
        self.bars: list[str] = []
        self._on_text = on_text

    def line(self, text: str) -> None:
        self.lines.append(text)
        self._on_text(text)

    warn = line

    def start(self, what: str, total: int, done: int = 0) -> None:
        self.bars.append(what)
        self._on_text(what)


def run(
    workdir: pathlib.Path, console: Console | None = None, resume: str = "auto", **overrides: Any
) -> dict[str, Any]:
    """Trains the tiny config on one device."""
    return train(tiny_config(mesh__data=1, **overrides), workdir, resume=resume, console=console or Silent())


def rows(workdir: pathlib.Path) -> list[dict[str, Any]]:
    """Returns the rows of metrics.jsonl."""
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
