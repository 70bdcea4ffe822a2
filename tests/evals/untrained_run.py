"""Folders of runs with an untrained encoder, for tests of what is done with finished runs."""

import io
import json
import pathlib
from typing import Any

import numpy as np

from jepa_jax.base.console import Console
from jepa_jax.config.groups import Config
from jepa_jax.data.sources import open_source
from jepa_jax.program.checkpoint import Checkpoints
from jepa_jax.program.step import TrainState
from jepa_jax.runtime.mesh import make_mesh
from tests.programs import build_program


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
