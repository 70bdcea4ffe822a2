"""A config made executable: its method, the layout of its state and its compiled functions, none of them run yet.

Training, description, inference and benchmarks build the same program: what one of them measures is what another runs.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
from jax.sharding import Mesh

from jepa_jax.base.errors import UserError
from jepa_jax.methods import Method, build_method
from jepa_jax.program import optim
from jepa_jax.program.step import StateFactory, make_train_step, state_factory

INITIAL_SAMPLES = 1024  # that a method may look at to initialise itself


@dataclasses.dataclass(frozen=True)
class Length:
    """How long a run is."""

    steps_per_epoch: int
    total_steps: int

    @classmethod
    def of(cls, config: Any, num_train: int) -> "Length":
        if config.data.batch_size > num_train:
            raise UserError(
                f"config.data.batch_size = {config.data.batch_size}: the train split has {num_train} images; "
                "use a smaller batch"
            )
        steps_per_epoch = num_train // config.data.batch_size
        total_steps = config.train.max_steps or max(1, round(config.optim.epochs * steps_per_epoch))
        return cls(steps_per_epoch, total_steps)


@dataclasses.dataclass(frozen=True)
class Program:
    """What a config computes."""

    method: Method
    factory: StateFactory
    train_step: Callable
    length: Length
    mesh: Mesh


def build_program(config: Any, *, num_train: int, num_classes: int, sample: Any, mesh: Mesh) -> Program:
    """The program of a validated config; `sample` is a uint8 batch of images, or only its ShapeDtypeStruct."""
    length = Length.of(config, num_train)
    method = build_method(config, total_steps=length.total_steps)
    tx, learning_rate = optim.make_optimizer(
        config.optim,
        batch_size=config.data.batch_size,
        steps_per_epoch=length.steps_per_epoch,
        total_steps=length.total_steps,
    )
    factory = state_factory(method, tx, sample=sample, num_classes=num_classes, mesh=mesh)
    train_step = make_train_step(
        method, tx, factory, accum_steps=config.train.accum_steps, learning_rate=learning_rate, mesh=mesh
    )
    return Program(method, factory, train_step, length, mesh)


def initial_sample(source: Any) -> dict[str, np.ndarray]:
    """Returns the first samples of a source, which a method may look at to initialise itself."""
    return source.batch(np.arange(min(INITIAL_SAMPLES, len(source))))
