"""BYOL, SimSiam, Barlow Twins and DINO: gradients that must not flow, slow copies, what each of them computes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jepa_jax.base.errors import UserError
from jepa_jax.losses.cosine import mean_cosine
from jepa_jax.program.config import changed_config
from jepa_jax.program.objective import Objective, statistics_of
from tests.arrays import normal
from tests.stepping import BATCH, IMAGES, STILL, assert_close, build_program, mesh_of, model_of
from tests.tiny import rival_config


@pytest.mark.parametrize("method, factor", [("byol", 4), ("simsiam", 1)])
def test_no_gradient_flows_through_what_is_predicted(method, factor):
    """A predictor that ignores its input leaves the target as the only way to the encoder; there must be none."""
    program = build_program(changed_config(rival_config(method), STILL))
    state = program.factory.create(0, BATCH)
    last = state.params["model"]["predictor"]["layers"][1]
    last["kernel"], last["bias"] = jnp.zeros_like(last["kernel"]), jnp.arange(8.0)
    gradient = jax.jit(jax.grad(Objective(program.method, program.factory).loss, has_aux=True))
    grads, (_, metrics) = gradient(state.params, statistics_of(state), state, BATCH, jax.random.key(0))
    assert not any(leaf.any() for leaf in jax.tree.leaves([grads["model"][n] for n in ("encoder", "projector")]))
    assert jnp.abs(grads["model"]["predictor"]["layers"][1]["bias"]).max() > 0
    assert float(metrics["loss"]) != pytest.approx(factor, abs=1e-3)  # that of a right angle


def test_the_loss_of_byol_is_two_minus_twice_the_cosine_for_each_view():
    """Without augmentation both views are the image, and both networks are equal at the first step."""
    program = build_program(changed_config(rival_config("byol"), STILL))
    model = model_of(program)
    output = nnx.jit(program.method.loss)(model, model, BATCH, jax.random.key(0), jnp.int32(0))
    model = model_of(program)

    @nnx.jit
    def similarity(model, images):
        z = model.projector(model.encoder(program.method.whole(images), train=True), train=True)
        return mean_cosine(model.predictor(z, train=True), z)

    expected = 2 * (2 - 2 * similarity(model, IMAGES))
    np.testing.assert_allclose(output.loss, expected, rtol=1e-4)
    np.testing.assert_allclose(output.terms["similarity"], 1 - expected / 4, rtol=1e-3)


def test_barlow_twins_of_equal_views_has_only_redundancy_left():
    program = build_program(changed_config(rival_config("barlow_twins"), STILL))
    model = model_of(program)
    output = nnx.jit(program.method.loss)(model, None, BATCH, jax.random.key(0), jnp.int32(0))
    assert output.terms["invariance"] < 1e-3 < output.terms["redundancy"]


@pytest.mark.parametrize("method", [pytest.param("byol", marks=pytest.mark.slow), "dino"])
def test_the_slow_copy_follows_by_half_a_cosine(method):
    program = build_program(rival_config(method, method__ema_start=0.9, optim__warmup_lr=1e-2))
    momentum, total = program.method.ema.momentum, program.length.total_steps
    np.testing.assert_allclose([momentum(0), momentum(total // 2), momentum(total)], [0.9, 0.95, 1.0], rtol=1e-6)
    state = program.factory.create(0, BATCH)
    before = jax.device_get(state.target)
    after, _ = program.train_step(state, BATCH)
    online = {name: after.params["model"][name] for name in before}
    assert_close(after.target, jax.tree.map(lambda old, new: 0.9 * old + 0.1 * new, before, online), rtol=1e-5)


def test_the_centre_follows_the_mean_of_the_teacher_over_both_views():
    config = changed_config(rival_config("dino", method__centre_momentum=0.8), STILL)
    program = build_program(config, mesh_of(8))  # the mean is over the images of all devices
    state = program.factory.create(0, BATCH)
    model = program.factory.merge(state.params["model"], state.stats)
    read = nnx.jit(lambda model, images: model.head(model.encoder(program.method.whole(images), train=True)))
    logits = read(model, IMAGES)
    assert not state.stats["centre"].any()
    after, metrics = program.train_step(state, BATCH)
    np.testing.assert_allclose(after.stats["centre"], 0.2 * jnp.mean(logits, axis=0), rtol=1e-4, atol=1e-6)
    assert float(metrics["teacher_entropy"]) < np.log(32)


def test_prototypes_are_directions_and_the_last_layer_starts_late():
    config = rival_config("dino", method__frozen_last_layer=0.25, optim__warmup_lr=1e-2)
    program = build_program(config)
    model = model_of(program)
    head = nnx.jit(lambda head, x: head(x))
    x = normal(0, (4, model.encoder.feature_dim))
    logits = head(model.head, x)
    model.head.last.kernel[...] = model.head.last.kernel[...] * np.linspace(0.5, 9.0, 32, dtype=np.float32)
    np.testing.assert_allclose(head(model.head, x), logits, rtol=1e-4, atol=1e-6)
    assert jnp.abs(logits).max() <= 1 + 1e-5  # cosines

    state, frozen = program.factory.create(0, BATCH), program.length.total_steps // 4
    kernels = [np.asarray(state.params["model"]["head"]["last"]["kernel"])]
    for _ in range(frozen + 1):
        state, _ = program.train_step(state, BATCH)
        kernels.append(np.asarray(state.params["model"]["head"]["last"]["kernel"]))
    assert frozen > 0 and all(np.array_equal(kernels[0], kernel) for kernel in kernels[: frozen + 1])
    assert not np.array_equal(kernels[frozen], kernels[frozen + 1])


@pytest.mark.slow
def test_only_the_student_sees_local_crops():
    """Where all views are the image, further views change nothing; smaller ones change the loss, not the centre."""

    def step(**overrides):
        still = STILL | {name.replace("data.augment", "method.local"): 0.0 for name in STILL if overrides}
        program = build_program(changed_config(rival_config("dino", **overrides), still))
        state, metrics = program.train_step(program.factory.create(0, BATCH), BATCH)
        return np.asarray(state.stats["centre"]), float(metrics["loss"])

    local = {"method__view_groups": ("local",), "method__local__count": 3}
    (centre, loss), (same_centre, same_loss) = step(), step(**local)
    small_centre, small_loss = step(**local, method__local__crop__size=8)
    assert same_loss == pytest.approx(loss, rel=1e-4) and small_loss != pytest.approx(loss, rel=1e-4)
    np.testing.assert_allclose([same_centre, small_centre], [centre, centre], rtol=1e-4, atol=1e-6)


def test_the_teacher_is_sharpest_at_first():
    program = build_program(rival_config("dino", method__teacher_warmup=0.5))
    temperature, total = program.method.teacher_temperature, program.length.total_steps
    np.testing.assert_allclose([temperature(0), temperature(total // 2), temperature(total)], [0.04, 0.07, 0.07])


@pytest.mark.parametrize(
    "method, changes, message",
    [
        (
            "byol",
            {"method__projector": ()},
            r"config.method.projector = \(\): needs at least one number, e.g. \(4096, 256\)",
        ),
        ("simsiam", {"eval__weights": "target"}, "this method keeps no copy of its encoder"),
        ("barlow_twins", {"method__redundancy_weight": -1.0}, r"redundancy_weight = -1.0: must be at least 0"),
        ("dino", {"method__view_groups": ("a",), "method__a__role": "both"}, r"a.role = 'both': the teacher sees"),
        ("dino", {"method__teacher_temperature": 0.2}, r"teacher_temperature = 0.2: above method.student_temperature"),
    ],
)
def test_what_cannot_work_is_refused(method, changes, message):
    with pytest.raises(UserError, match=message):
        rival_config(method, **changes)
