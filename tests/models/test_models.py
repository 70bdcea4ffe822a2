"""Encoders: parameter counts of the references, invariances, precision and recomputation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jepa_jax.base.errors import UserError
from jepa_jax.models.heads import Projector
from jepa_jax.models.registry import build_encoder
from jepa_jax.program.config import load_config
from tests.arrays import create, normal

RESNET = dict(stem="cifar", width=64)


def build(view_size=32, precision="float32", remat="none", channels=3, **model):
    """Returns an encoder of a run on `view_size`-pixel images."""
    changes = {
        "model": model, "data.image_size": view_size, "data.channels": channels, "train.precision": precision,
        "train.remat": remat, "data.augment.crop.size": 0, "data.augment.mean": (0.5,) * channels,
        "data.augment.std": (0.25,) * channels, "data.augment.jitter.probability": 0.0,
        "data.augment.grayscale.probability": 0.0,
    }  # fmt: skip
    sample = jnp.asarray(normal(1, (64, 32, 32, channels)))
    return build_encoder(load_config("quickstart", changes), sample, nnx.Rngs(0))


def num_params(module):
    return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(module, nnx.Param)))


@pytest.mark.parametrize(
    "expected, feature_dim, size, model",
    [
        (11_168_832, 512, 32, dict(name="resnet18", **RESNET)),
        (21_276_992, 512, 32, dict(name="resnet34", **RESNET)),
        (23_508_032, 2048, 224, dict(name="resnet50", stem="imagenet", width=64)),
        pytest.param(42_500_160, 2048, 224, dict(name="resnet101", stem="imagenet", width=64), marks=pytest.mark.slow),
        (5_524_416, 192, 224, dict(name="vit_tiny", patch_size=16, pool="cls", cls_token=True, positions="learned")),
        (21_665_664, 384, 224, dict(name="vit_small", patch_size=16, pool="cls", cls_token=True, positions="learned")),
        (85_798_656, 768, 224, dict(name="vit_base", patch_size=16, pool="mean", cls_token=True, positions="learned")),
    ],
)
def test_parameter_counts(expected, feature_dim, size, model):
    encoder = nnx.eval_shape(lambda: build(size, **model))
    assert num_params(encoder) == expected
    assert encoder.feature_dim == feature_dim


TINY = [
    dict(name="resnet10", stem="cifar", width=4),
    dict(name="vit_tiny", patch_size=16, pool="mean", cls_token=True, positions="learned"),
    dict(name="patchnet", patch_size=6, stride=2, stem_width=8, widths=(8, 16)),
]


@pytest.mark.parametrize(
    "model", [TINY[0], TINY[2], pytest.param(TINY[1], marks=pytest.mark.slow)], ids=lambda m: m["name"]
)
def test_features_of_an_image_do_not_depend_on_its_batch(model):
    encoder = create(lambda: build(**model))
    images = normal(0, (4, 32, 32, 3))
    encode = jax.jit(lambda x: encoder(x))
    others = np.concatenate([images[:1], -3 * images[1:]])
    np.testing.assert_allclose(encode(images)[0], encode(others)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("model", TINY[:2], ids=lambda m: m["name"])
def test_recomputing_blocks_changes_neither_value_nor_gradient_nor_statistics(model):
    images = jnp.asarray(normal(0, (4, 32, 32, 3)))

    def outcome(remat):
        graphdef, params, stats = nnx.split(create(lambda: build(remat=remat, **model)), nnx.Param, ...)

        def loss(params):
            encoder = nnx.merge(graphdef, params, stats, copy=True)
            value = jnp.sum(jnp.square(encoder(images, train=True)))
            return value, nnx.to_pure_dict(nnx.state(encoder, nnx.Not(nnx.Param)))

        return jax.jit(jax.value_and_grad(loss, has_aux=True))(params)

    def close(a, b):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3 * float(jnp.max(jnp.abs(a))) + 1e-6)

    jax.tree.map(close, outcome("none"), outcome("full"))


@pytest.mark.parametrize("model", TINY, ids=lambda m: m["name"])
def test_bfloat16_computes_in_bfloat16_keeps_float32_parameters_and_statistics(model):
    encoder = nnx.eval_shape(lambda: build(precision="bfloat16", **model))
    graphdef, state = nnx.split(encoder)
    assert {leaf.dtype for leaf in jax.tree.leaves(state)} == {jnp.dtype("float32")}
    encode = jax.jit(lambda state, x: nnx.merge(graphdef, state, copy=True)(x))
    images = jax.ShapeDtypeStruct((2, 32, 32, 3), jnp.float32)
    program = encode.trace(state, images).lower(lowering_platforms=("cuda",)).as_text()
    products = [line for line in program.splitlines() if "stablehlo.convolution" in line or "stablehlo.dot" in line]
    operands = [line.rsplit(" : ", 1)[1].split("->")[0] for line in products]  # a sum may be kept in float32
    assert operands and all("f32" not in types for types in operands)


@pytest.mark.parametrize("channels", [1, 4])
@pytest.mark.parametrize("model", TINY, ids=lambda m: m["name"])
def test_encoders_take_any_number_of_channels(model, channels):
    encoder = nnx.eval_shape(lambda: build(channels=channels, **model))
    graphdef, state = nnx.split(encoder)
    images = jax.ShapeDtypeStruct((2, 32, 32, channels), jnp.float32)
    features = jax.eval_shape(lambda state, x: nnx.merge(graphdef, state)(x), state, images)
    assert features.shape == (2, encoder.feature_dim)


def test_a_stem_for_cifar_keeps_the_size_and_one_for_imagenet_quarters_it():
    def first_map(stem):
        encoder = nnx.eval_shape(lambda: build(name="resnet10", stem=stem, width=8))
        graphdef, state = nnx.split(encoder)
        encode = jax.jit(lambda state, x: nnx.merge(graphdef, state, copy=True)(x))
        images = jax.ShapeDtypeStruct((1, 64, 64, 3), jnp.float32)
        program = encode.trace(state, images).lower(lowering_platforms=("cuda",)).as_text()
        return "tensor<1x64x64x8xf32>" in program, "tensor<1x16x16x8xf32>" in program

    assert first_map("cifar") == (True, False)
    assert first_map("imagenet") == (False, True)


def test_a_patch_that_does_not_fit_is_refused():
    with pytest.raises(UserError, match=r"model.patch_size = 5.*32-pixel"):
        build(name="vit_tiny", patch_size=5, pool="cls", cls_token=True, positions="learned")


def test_projector_normalises_hidden_layers_and_not_its_output():
    projector = create(lambda: Projector(8, (16, 16, 4), rngs=nnx.Rngs(0)))
    assert num_params(projector) == (8 * 16 + 16) + (16 * 16 + 16) + 2 * 32 + (16 * 4 + 4)
    z = nnx.jit(lambda projector, x: projector(x, train=True))(projector, 10 + normal(0, (64, 8)))
    assert z.shape == (64, 4) and float(jnp.abs(z.mean(0)).max()) > 0.02
