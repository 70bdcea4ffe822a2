"""A config made executable: its method, the layout of its state and its compiled functions, none of them run yet.

Training, description, inference and benchmarks build the same program: what one of them measures is what another runs.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jepa_jax.base.errors import UserError
from jepa_jax.config.groups import Config
from jepa_jax.data.batches import SampleOrder
from jepa_jax.data.contract import Spec, element_bytes, sample
from jepa_jax.methods.contract import EncoderMethod, Method, build_method
from jepa_jax.methods.whole_batch import accumulates_exactly
from jepa_jax.program import optim
from jepa_jax.program.initial_weights import initial_weights
from jepa_jax.program.step import StateFactory, TrainStep, abstract_model, make_train_step, state_factory

INITIAL_ELEMENTS = 1024  # of the train split, that a method may use to initialise itself
INITIAL_BYTES = 2**28  # that they may take; elements of 400 x 400 pixels and 20 frames have 5 MB


@dataclasses.dataclass(frozen=True)
class Length:
    steps_per_epoch: int
    total_steps: int

    @classmethod
    def of(cls, config: Config, num_train: int) -> "Length":
        """Returns the length of a run on `num_train` elements; refuses a batch that is larger than the train split."""
        steps = SampleOrder(num_train, config.data.batch_size).steps_per_epoch
        return cls(steps, config.train.max_steps or max(1, round(config.optim.epochs * steps)))


@dataclasses.dataclass(frozen=True)
class Program:
    """What a config computes."""

    method: Method
    factory: StateFactory
    train_step: TrainStep
    reached: set[str]  # paths of the parameters that the loss depends on; filled when the step is traced
    useful_step: TrainStep  # without what remat and exact accumulation compute twice: counts for MFU, is never run
    length: Length
    mesh: Mesh
    spec: Spec  # of one element of the data

    @property
    def encoder_method(self) -> EncoderMethod:
        """The method, of a program that is known to learn an encoder."""
        if not isinstance(self.method, EncoderMethod):
            raise UserError(f"config.method.name: {type(self.method).__name__} learns no encoder; it has no features")
        return self.method


def build_program(
    config: Config, *, num_train: int, num_classes: int, sample: Mapping[str, Any], mesh: Mesh
) -> Program:
    """Returns the program of a config.

    Args:
      num_classes: of the labels; 0 without labels, then there is no online probe.
      sample: a batch of training data, or only its ShapeDtypeStructs.
    """
    length = Length.of(config, num_train)
    method = build_method(config, total_steps=length.total_steps)
    model = abstract_model(method, sample)
    tx, learning_rate = optim.make_optimizer(
        config.optim,
        batch_size=config.data.batch_size,
        steps_per_epoch=length.steps_per_epoch,
        total_steps=length.total_steps,
        groups=method.param_groups,
        exempt=optim.undecayed(model),
    )
    factory = state_factory(
        method, tx, model, sample=sample, num_classes=num_classes, mesh=mesh,
        load=lambda params: initial_weights(config, method.pretrained, params),
    )  # fmt: skip
    reached: set[str] = set()
    exact = config.train.accum_steps > 1 and accumulates_exactly(method, config)
    fixed: dict[str, Any] = {"accum_steps": config.train.accum_steps, "learning_rate": learning_rate, "mesh": mesh}
    useful_step = train_step = make_train_step(method, tx, factory, exact=exact, reached=reached, **fixed)
    if config.train.remat != "none" or exact:
        useful_step = make_train_step(method, tx, factory, exact=False, remat=False, **fixed)
    spec = {name: jax.ShapeDtypeStruct(array.shape[1:], array.dtype) for name, array in sample.items()}
    return Program(method, factory, train_step, reached, useful_step, length, mesh, spec)


def initial_sample(source: Any) -> dict[str, np.ndarray]:
    """Returns the elements of a source that a method may look at to initialise itself."""
    affordable = max(1, INITIAL_BYTES // element_bytes(source.spec))
    batch = source.batch(sample(len(source), min(INITIAL_ELEMENTS, affordable)))
    return {name: batch[name] for name in source.spec}
