"""The validation loss: of the model as it is used, without dropout."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jepa_jax.data.sources import open_data
from jepa_jax.evals.evaluators import EvaluationContext
from jepa_jax.evals.validation_loss import ValidationLoss
from jepa_jax.methods.contract import Output
from jepa_jax.methods.image_method import EncoderWith, ImageMethod
from jepa_jax.program.objective import Objective, statistics_of
from tests.stepping import build_program
from tests.tiny import tiny_config


class Dropping(ImageMethod):
    """A method whose only randomness is dropout."""

    def init(self, key, sample):
        rngs = nnx.Rngs(params=key, dropout=jax.random.fold_in(key, 1))
        return EncoderWith(self.encoder(sample, rngs), dropout=nnx.Dropout(0.5, rngs=rngs))

    def loss(self, model, target, batch, key, step):
        features = self.features(model, batch, train=True)
        return Output(jnp.mean(jnp.square(model.dropout(features) - 1)), {}, features)


def test_dropout_has_no_part_in_the_validation_loss():
    config = tiny_config(
        method__name=f"{__name__}:Dropping", data__validation=0.25, train__keep_best="validation_loss", mesh__data=1
    )
    train, test, validation = open_data(config.data)
    batch = validation.batch(np.arange(config.data.batch_size))
    program = build_program(config, batch=batch)
    state = program.factory.create(0, batch)
    evaluator = ValidationLoss(EvaluationContext(config, program, (train, test), validation=validation))
    first, second = (float(evaluator._loss(state, batch, jax.random.key(seed))) for seed in (1, 2))
    assert first == second
    loss = jax.jit(Objective(program.method, program.factory).loss)
    trained = [
        float(loss(state.params, statistics_of(state), state, batch, jax.random.key(seed))[0]) for seed in (1, 2)
    ]
    assert trained[0] != pytest.approx(trained[1], rel=1e-4)  # in training it has
