"""Runs of the tiny config, for tests that look at what a run does and leaves."""

import json
import os
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np

from jepa_jax.base.console import Console
from jepa_jax.training.run import train
from tests.programs import shared_programs
from tests.tiny import tiny_config

WHOLE = {"eval__untrained": True, "profile__enabled": True}  # what the tiny config leaves out


class KillNine(BaseException):
    """Ends a run where `kill -9` would: no handler of exceptions sees it."""


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

    def start(self, what: str, total: int | None, done: int = 0) -> None:
        self.bars.append(what)
        self._on_text(what)


class Killed(Silent):
    """Ends a run in a step of training, as `kill -9` would."""

    def __init__(self, step: int):
        super().__init__()
        self._left = step

    def advance(self, amount: int = 1, note: Callable[[], str] | None = None) -> None:
        self._left -= self.bars[-1] == "train"
        if not self._left:
            raise KillNine


def run(
    workdir: pathlib.Path, console: Console | None = None, resume: str = "auto", **overrides: Any
) -> dict[str, Any]:
    """Trains the tiny config on one device."""
    with shared_programs():
        return train(tiny_config(mesh__data=1, **overrides), workdir, resume=resume, console=console or Silent())


def rows(workdir: pathlib.Path) -> list[dict[str, Any]]:
    """Returns the rows of metrics.jsonl."""
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def unlabelled(folder: pathlib.Path, channels: int = 3) -> dict[str, Any]:
    """Writes an npz data set of random images without labels; returns the overrides of a config that uses it."""
    images = np.random.default_rng(0).integers(0, 256, (128, 16, 16, channels), np.uint8)
    np.savez(folder / "data.npz", x_train=images[:96], x_test=images[96:])
    return dict(
        data__source="npz", data__dir=str(folder / "data.npz"), data__channels=channels, data__num_train=0,
        data__num_test=0, data__augment__mean=(0.5,) * channels, data__augment__std=(0.2,) * channels,
        data__augment__jitter__probability=0.0, data__augment__grayscale__probability=0.0,
    )  # fmt: skip


def one_class(folder: pathlib.Path) -> dict[str, Any]:
    """Writes an npz data set of random images of one class; returns the overrides of a config that uses it."""
    overrides = unlabelled(folder)
    with np.load(folder / "data.npz") as stored:
        labels = {f"y_{split}": np.zeros(len(stored[f"x_{split}"]), np.int64) for split in ("train", "test")}
        np.savez(folder / "data.npz", **labels, **stored)
    return overrides
