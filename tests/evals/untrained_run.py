"""Folders of runs with an untrained encoder, for tests of what is done with finished runs."""

import io
import json
import pathlib
from typing import Any

import numpy as np

from jepa_jax.base.console import Console
from jepa_jax.config.groups import Config
from jepa_jax.data.sources import open_source
from jepa_jax.program.build import build_program
from jepa_jax.program.checkpoint import Checkpoints
from jepa_jax.program.step import TrainState
from jepa_jax.runtime.mesh import make_mesh


def quiet() -> Console:
    return Console(io.StringIO())


def write_run(config: Config, folder: pathlib.Path, change: Any = lambda state: state) -> TrainState:
    """Writes config and checkpoint without compiling a training step; returns the state, changed by `change`."""
    source = open_source(config.data, "train")
    sample = source.batch(np.arange(min(64, len(source))))
    classes = len(source.classes)
    program = build_program(config, num_train=len(source), num_classes=classes, sample=sample, mesh=make_mesh(1, 1))
    state = change(program.factory.create(0, sample))
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    with Checkpoints(folder / "checkpoints") as checkpoints:
        checkpoints.save(7, state, {})
    return state


def unlabelled(folder: pathlib.Path, channels: int = 3) -> dict[str, Any]:
    """Writes an npz data set of random images without labels; returns the overrides of a config that uses it."""
    images = np.random.default_rng(0).integers(0, 256, (128, 16, 16, channels), np.uint8)
    np.savez(folder / "data.npz", x_train=images[:96], x_test=images[96:])
    return dict(
        data__source="npz", data__dir=str(folder / "data.npz"), data__channels=channels, data__num_train=0,
        data__num_test=0, data__augment__mean=(0.5,) * channels, data__augment__std=(0.2,) * channels,
        data__augment__jitter__probability=0.0, data__augment__grayscale__probability=0.0,
    )  # fmt: skip
