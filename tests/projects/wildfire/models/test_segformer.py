"""SegFormer: the outputs of transformers from its weights, published sizes, and what training adds."""

import json
import math
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jepa_jax.base.errors import UserError
from jepa_jax.models.rngs import init_rngs
from jepa_jax.projects.wildfire.models.segformer import SIZES, SegFormer, SegFormerSize
from jepa_jax.projects.wildfire.models.segformer_weights import load_segformer, read_config
from jepa_jax.weights import load_model
from tests.weights.golden import SEGFORMER

TINY = SegFormerSize((4, 8, 8, 8), (1, 1, 1, 1), 8, heads=(1, 2, 2, 2))


@pytest.fixture(scope="module")
def golden():
    return {name: value for name, value in np.load(SEGFORMER / "io.npz").items()}


def channels_last(x):
    return jnp.asarray(x.transpose(0, 2, 3, 1))


def test_stages_and_logits_equal_those_of_transformers(golden):
    graph, state = nnx.split(load_model(SEGFORMER).module)

    @jax.jit
    def run(state, x):
        model = nnx.merge(graph, state)
        maps = model.encoder(x)
        return maps, model.head(maps)

    maps, logits = run(state, channels_last(golden["pixel_values"]))
    # Ten times stricter than asked for: another epsilon of the layer norms would be off by 7e-5.
    for i, stage in enumerate(maps):
        np.testing.assert_allclose(stage, channels_last(golden[f"stage_{i}"]), atol=1e-5)
    np.testing.assert_allclose(logits, channels_last(golden["logits"]), atol=1e-5)


@pytest.mark.parametrize("name, millions", [("b0", 3.7), ("b1", 13.7), ("b2", 27)])
def test_published_sizes(name, millions):
    model = nnx.eval_shape(lambda: SegFormer(SIZES[name], classes=150, rngs=init_rngs(0)))
    count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
    assert count / 1e6 == pytest.approx(millions, rel=0.02)


def test_other_channels_are_adapted_and_said(golden):
    original, _ = load_segformer(SEGFORMER)
    model, changes = load_segformer(SEGFORMER, channels=5)
    assert len(changes) == 1 and "from 3 to 5 channels" in changes[0]
    gray = channels_last(golden["pixel_values"][:1, :1])
    embed, adapted = original.encoder.stages[0].embed, model.encoder.stages[0].embed
    colours, spread = jax.jit(lambda gray: (embed(jnp.repeat(gray, 3, -1)), adapted(jnp.repeat(gray, 5, -1))))(gray)
    np.testing.assert_allclose(spread, colours, atol=1e-5)


def test_a_config_that_is_not_supported_is_refused(tmp_path):
    for name in ("config.json", "model.safetensors"):
        shutil.copy(SEGFORMER / name, tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**saved, "hidden_act": "relu"}))
    with pytest.raises(UserError, match="hidden_act = 'relu'"):
        load_segformer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**saved, "depths": [1, 1, 1, 1]}))
    with pytest.raises(UserError, match=r"encoder.block.0.1.mlp.dense1.weight is left over"):
        load_segformer(tmp_path)


def test_drop_path_grows_linearly_over_all_blocks():
    model = nnx.eval_shape(lambda: SegFormer(SIZES["b0"], classes=2, drop_path=0.7, rngs=init_rngs(0)))
    drops = [block.drop for stage in model.encoder.stages for block in stage.blocks]
    np.testing.assert_allclose([0 if drop is None else drop.rate for drop in drops], np.linspace(0, 0.7, 8))


def test_an_image_that_is_too_small_is_refused():
    with pytest.raises(ValueError, match="4 x 4 pixels cannot be reduced 8 x 8; use larger images"):
        jax.eval_shape(lambda: SegFormer(TINY, classes=2, rngs=init_rngs(0))(jnp.zeros((1, 16, 16, 3))))


def test_weights_of_another_architecture_are_refused(tmp_path):
    with pytest.raises(UserError, match="config.json: not found"):
        read_config(tmp_path)
    assert read_config(SEGFORMER)["depths"] == [2, 1, 1, 1]
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["ViTModel"]}))
    with pytest.raises(UserError, match="ViTModel.*SegformerForSemanticSegmentation"):
        read_config(tmp_path)
