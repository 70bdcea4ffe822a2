"""The validation loss: of the model as it is used, without dropout."""

import jax
import pytest

from jepa_jax.data.sources import open_data
from jepa_jax.evals.evaluators import EvaluationContext
from jepa_jax.evals.validation_loss import ValidationLoss
from jepa_jax.program.build import build_program, initial_sample
from jepa_jax.program.step import loss_function, statistics_of
from tests.stepping import mesh_of
from tests.tiny import tiny_fire_config


def test_dropout_has_no_part_in_the_validation_loss():
    config = tiny_fire_config(data__validation=0.25, model__dropout=0.5, train__keep_best="validation_loss")
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
