"""The validation loss: of the model as it is used, without dropout."""

import jax
import numpy as np
import pytest
from flax import nnx

from jepa_jax.data.sources import open_data
from jepa_jax.evals.evaluators import EvaluationContext
from jepa_jax.evals.validation_loss import ValidationLoss
from jepa_jax.program.build import build_program, initial_sample
from jepa_jax.program.step import loss_function, statistics_of
from tests.sequence_methods import HistoryMethod, padded_config
from tests.stepping import mesh_of


class DropoutMethod(HistoryMethod):
    """Drops half of the masks' pixels in training."""

    def init(self, key, sample):
        return nnx.List([*super().init(key, sample), nnx.Dropout(0.5, rngs=nnx.Rngs(dropout=key))])

    def loss(self, model, target, batch, key, step):
        *layers, drop = model
        frames = drop(batch["frames"].astype(np.float32))
        return super().loss(layers, target, {**batch, "frames": frames}, key, step)


def test_dropout_has_no_part_in_the_validation_loss():
    config = padded_config(
        method__name=f"{__name__}:DropoutMethod", data__validation=0.25, train__keep_best="validation_loss"
    )
    train, test, validation = open_data(config.data)
    sample = initial_sample(train)
    program = build_program(config, num_train=len(train), num_classes=0, sample=sample, mesh=mesh_of(1))
    state = program.factory.create(0, sample)
    evaluator = ValidationLoss(EvaluationContext(config, program, (train, test), validation=validation))
    batch = validation.batch(range(config.data.batch_size))
    first, second = (float(evaluator._loss(state, batch, jax.random.key(seed))) for seed in (1, 2))
    assert first == second
    loss = jax.jit(loss_function(program.method, program.factory))
    trained = [
        float(loss(state.params, statistics_of(state), state, batch, jax.random.key(seed))[0]) for seed in (1, 2)
    ]
    assert trained[0] != pytest.approx(trained[1], rel=1e-4)  # in training it has
