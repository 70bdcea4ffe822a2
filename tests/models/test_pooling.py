"""Pooling of encoder outputs: closed forms, float32 whatever the encoder computes in, refusals by name."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jepa_jax.base.errors import UserError
from jepa_jax.models.pooling import EncoderOutputs, area_means, area_weights, pooled
from jepa_jax.program.config import load_config
from tests.arrays import normal
from tests.stepping import BATCH, IMAGES, build_program, model_of
from tests.tiny import tiny_config, tiny_masked_config

VIT = dict(model__name="vit", model__width=16, model__depth=1, model__heads=2, model__patch_size=4)


def test_quadrants_are_concatenated_row_by_row_and_a_middle_row_counts_half_in_each():
    even = EncoderOutputs(jnp.arange(16.0).reshape(1, 4, 4, 1))
    np.testing.assert_allclose(pooled(even, "grid2")[0], [2.5, 4.5, 10.5, 12.5])
    rows = EncoderOutputs(jnp.broadcast_to(jnp.array([0.0, 3.0, 9.0])[None, :, None, None], (1, 3, 3, 2)))
    upper, lower = (0 + 3 / 2) / 1.5, (3 / 2 + 9) / 1.5
    np.testing.assert_allclose(pooled(rows, "grid2")[0], [upper] * 4 + [lower] * 4, rtol=1e-6)
    np.testing.assert_allclose(pooled(rows, "mean"), [[4.0, 4.0]])


@pytest.mark.parametrize(
    ("height", "width", "side"), [(4, 4, 2), (8, 4, 4), (2, 6, 2), (12, 12, 2), (14, 14, 4), (3, 5, 2)]
)
def test_areas_have_the_mean_of_what_they_cover(height, width, side):
    cells = np.random.default_rng(0).normal(size=(2, height, width, 3)).astype(np.float32)
    rows, columns = area_weights(height, side), area_weights(width, side)
    np.testing.assert_allclose(rows.sum(axis=1), 1, rtol=1e-6)
    expected = np.einsum("ih,jw,bhwd->bijd", rows, columns, cells.astype(np.float64))
    np.testing.assert_allclose(jax.jit(area_means, static_argnums=1)(cells, side), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("side", [1, 2, 4])
def test_gradients_of_areas_are_shared_out_and_bfloat16_is_summed_in_float32(side):
    cells = jnp.asarray(np.random.default_rng(0).normal(3, 1, (4, 8, 8, 16)), jnp.bfloat16)
    wide, rows = np.asarray(cells, np.float64), area_weights(8, side)
    exact = np.einsum("ih,jw,bhwd->bijd", rows, rows, wide)
    means = jax.jit(area_means, static_argnums=1)(cells, side)
    np.testing.assert_allclose(np.asarray(means, np.float64), exact, rtol=2**-8)  # one rounding
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(area_means(x, side)[:, 0, 0])))(wide.astype(np.float32))
    np.testing.assert_allclose(gradient[0, :, :, 0], np.outer(rows[0], rows[0]), rtol=1e-5, atol=1e-7)


def test_patches_in_bfloat16_are_pooled_in_float32():
    method = build_program(tiny_masked_config("ijepa", train__precision="bfloat16")).method
    patches = normal(0, (2, 64, 16)).astype(jnp.bfloat16)
    features = nnx.jit(method.pooled)(EncoderOutputs(patches.reshape(2, 8, 8, 16)))
    assert features.dtype == jnp.float32
    np.testing.assert_allclose(features, patches.astype(np.float64).mean(axis=1), atol=1e-6)
    model = nnx.eval_shape(lambda: method.init(jax.random.key(0), {"image": jnp.asarray(IMAGES)}))
    read = nnx.eval_shape(lambda model, images: model.encoder.patches(method.whole(images)), model, IMAGES)
    assert read.dtype == jnp.bfloat16


@pytest.mark.parametrize("pool", ["mean", "grid2", "cls"])
def test_the_pool_of_evaluation_is_that_of_the_features_and_of_the_online_probe(pool):
    program = build_program(tiny_config(**VIT, eval__pool=pool))
    model = model_of(program)
    features = nnx.jit(program.method.features)(model, {"image": IMAGES})
    tokens = nnx.jit(lambda m, x: m.encoder.encode(m.encoder.embed(program.method.whole(x))))(model, IMAGES)
    cells = np.asarray(tokens[:, 1:]).reshape(16, 2, 2, 2, 2, 16)  # quadrant row, row, quadrant column, column
    expected = {"mean": cells.mean((1, 2, 3, 4)), "cls": tokens[:, 0], "grid2": cells.mean((2, 4)).reshape(16, 64)}
    np.testing.assert_allclose(features, expected[pool], rtol=1e-4, atol=1e-5)
    _, metrics = jax.eval_shape(program.train_step, program.factory.abstract, shapes())
    assert "probe_accuracy" in metrics
    assert program.factory.abstract.params["probe"]["kernel"].shape == (64 if pool == "grid2" else 16, 10)


def test_the_loss_does_not_depend_on_the_pool_of_evaluation():
    def loss(pool):
        program = build_program(tiny_config(eval__pool=pool))
        step = nnx.jit(program.method.loss)
        return float(step(model_of(program), None, {"image": IMAGES}, jax.random.key(0), jnp.int32(0)).loss)

    assert loss("mean") == pytest.approx(loss("grid2"), rel=1e-5)


def test_the_default_is_the_pool_of_the_model():
    assert load_config("mae_quickstart", {"model.pool": "cls"}).eval.pool == "cls"
    assert load_config("mae_quickstart").eval.pool == load_config("quickstart").eval.pool == "mean"


@pytest.mark.parametrize(
    "config",
    [dict(), dict(**VIT, model__cls_token=False), dict(model__name="tests.methods.test_user_method:MeanColour")],
    ids=["convolutional", "without CLS", "own encoder"],
)
def test_a_pool_that_an_encoder_cannot_give_is_refused_by_name(config):
    with pytest.raises(UserError, match=r"config.eval.pool = 'cls': .*model.name = .*; use mean"):
        build_program(tiny_config(**config, eval__pool="cls"))


def test_a_method_that_trains_no_cls_output_refuses_it():
    with pytest.raises(UserError, match=r"config.eval.pool = 'cls': hjepa trains no CLS output; use mean or grid2"):
        tiny_masked_config("hjepa", eval__pool="cls")


def shapes():
    return {name: jax.ShapeDtypeStruct(value.shape, value.dtype) for name, value in BATCH.items()}
