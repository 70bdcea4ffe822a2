"""BYOL, SimCLR, SimSiam, Barlow Twins and DINO: gradients that must not flow, slow copies, what each computes."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jepa_jax.base.errors import UserError
from jepa_jax.losses.cosine import mean_cosine
from jepa_jax.methods.dino import hidden_blocks
from jepa_jax.models.vit import Hidden, ViT
from jepa_jax.program.config import changed_config
from jepa_jax.program.objective import Objective, statistics_of
from tests.arrays import normal
from tests.stepping import BATCH, IMAGES, STILL, assert_close, build_program, mesh_of, model_of
from tests.tiny import DINOV2, rival_config, tiny_config


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


@pytest.mark.parametrize("method", ["byol", "simclr", "dino", "image_jepa"])
def test_the_second_view_may_be_made_in_another_way(method):
    """Where the first view is the image and the second one is solarized: by 255 - x from level 0 on."""
    second = {"view_groups": ("second",), "second.solarize.probability": 1.0, "second.solarize.threshold": 0.0}
    if method in ("dino", "image_jepa"):
        second |= {"views": 1, "second.role": "both"}
    config = rival_config(method) if method != "image_jepa" else tiny_config()
    still = STILL | {name.replace("data.augment", "method.second"): 0.0 for name in STILL}
    config = changed_config(config, still | {f"method.{name}": value for name, value in second.items()})
    program = build_program(config)
    first, solarized = jax.jit(program.method.example_views)(BATCH, jax.random.key(0))
    np.testing.assert_allclose(first, program.method.whole(jnp.asarray(IMAGES)), atol=1e-5)
    np.testing.assert_allclose(solarized, program.method.whole(jnp.asarray(255 - IMAGES)), atol=1e-5)
    assert config.loader_crops == {} and config.method.num_views == 1
    _, metrics = program.train_step(program.factory.create(0, BATCH), BATCH)
    assert np.isfinite(metrics["loss"])


def test_hidden_blocks_have_as_many_patches_as_they_say():
    config = types.SimpleNamespace(masked_share=(0.1, 0.5), masked_images=0.5)
    places, index, weights = jax.jit(lambda key: hidden_blocks(key, 64, 8, config))(jax.random.key(0))
    counts = places.sum(axis=1)
    assert (
        (counts > 0).sum() == 32 and counts[counts > 0].min() >= 6 and counts.max() <= 32 and len(np.unique(counts)) > 5
    )
    np.testing.assert_array_equal(counts, weights.sum(axis=1))
    for one, where, weight in zip(places, index, weights, strict=True):
        assert set(np.flatnonzero(one)) == set(where[weight > 0].tolist())
    rows = places.reshape(64, 8, 8).any(axis=2)  # a block: rows without a gap
    assert all(np.ptp(np.flatnonzero(row)) + 1 == row.sum() for row in rows if row.any())
    assert (places.mean(axis=0) > 0.03).all()  # every patch is hidden now and then


@pytest.mark.slow
def test_what_has_no_weight_is_not_computed():
    def text(**overrides):
        config = changed_config(tiny_config(**DINOV2 | overrides), STILL)
        program = build_program(config)
        return program.train_step.lower(program.factory.abstract, BATCH).as_text(), program

    with_patches, program = text()
    without, plain = text(method__patch_weight=0.0)
    assert "mask_token" in program.factory.abstract.params["model"]
    assert "mask_token" not in plain.factory.abstract.params["model"] and len(without) < len(with_patches)
    assert len(text(method__koleo_weight=0.0)[0]) < len(with_patches)


def test_pixels_of_hidden_patches_do_not_reach_the_outputs():
    vit = ViT(8, 1, 1, image_size=16, patch_size=8, rngs=nnx.Rngs(0))
    hidden = Hidden(jnp.array([[True, False, False, False]]), jnp.arange(8.0))
    image = jnp.asarray(normal(1, (1, 16, 16, 3)))
    read = nnx.jit(lambda vit, image: [vit.outputs(image, hidden=hidden).cells, vit.outputs(image).cells])
    (first, whole), (second, other) = read(vit, image), read(vit, image.at[:, :8, :8].add(1.0))
    np.testing.assert_array_equal(first, second)
    assert not np.allclose(whole, other) and not np.allclose(whole, first)


def test_every_term_of_dinov2_trains():
    config = changed_config(tiny_config(**DINOV2 | {"method__centring": "mean"}), STILL)
    program = build_program(config)
    state = program.factory.create(0, BATCH)
    for _ in range(2):
        state, metrics = program.train_step(state, BATCH)
        assert {"patches", "koleo", "teacher_entropy"} <= metrics.keys() and np.isfinite(metrics["loss"])
    assert state.stats["patch_centre"].any() and state.params["model"]["mask_token"].any()


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
        ("dino", {"method__view_groups": ("a",), "method__a__role": "target"}, r"a.role = 'target': the student sees"),
        ("byol", {"method__view_groups": ("a", "b")}, "method.view_groups = .*: data.augment makes one of the two"),
        ("dino", {"method__views": 1}, "method.views = 1: leaves one view"),
        ("image_jepa", {"method__views": 1}, "method.views = 1: leaves one view to agree with"),
        ("dino", {"method__patches": "ibot"}, "method.patches = 'ibot': needs patches to hide"),
        ("dino", {"method__teacher_temperature": 0.2}, r"teacher_temperature = 0.2: above method.student_temperature"),
    ],
)
def test_what_cannot_work_is_refused(method, changes, message):
    with pytest.raises(UserError, match=message):
        rival_config(method, **changes)
