"""EmberFormer: padding and company change nothing, the last valid frame does; sizes; public decoder weights."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jepa_jax.base.errors import UserError
from jepa_jax.models.rngs import init_rngs
from jepa_jax.program.config import load_config
from jepa_jax.projects.wildfire.models.emberformer import EmberFormer, last_valid, time_embedding
from jepa_jax.projects.wildfire.models.segformer import SIZES
from jepa_jax.projects.wildfire.models.segformer_weights import load_segformer, segformer_variables
from tests.arrays import create
from tests.projects.wildfire.tiny import tiny_fire_config
from tests.weights.golden import SEGFORMER

FRAMES = 3


@pytest.fixture(scope="module", params=["post", "pre"])
def predict(request):
    config = tiny_fire_config(model__norm=request.param, model__dropout=0.3)
    graph, state = nnx.split(create(lambda: EmberFormer(config.model, 3, rngs=init_rngs(0))))
    return jax.jit(lambda batch: nnx.merge(graph, state)(batch))


def histories(count: int, frames: int = FRAMES, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "fire": rng.random((count, frames, 16, 16, 1)) < 0.2,
        "wind": rng.random((count, frames, 2), np.float32),
        "static": rng.random((count, 16, 16, 3), np.float32),
        "valid": np.ones((count, frames), bool),
    }


def padded(batch, before: int, after: int):
    """Adds frames of rubbish on both sides."""
    rubbish = {"fire": True, "wind": 7.0, "valid": False}

    def pad(name, array):
        if name not in rubbish:
            return array
        sides = ((0, 0), (before, after)) + ((0, 0),) * (array.ndim - 2)
        return np.pad(array, sides, constant_values=rubbish[name])

    return {name: pad(name, array) for name, array in batch.items()}


@pytest.mark.parametrize("before, after", [(5, 0), (0, 5), (2, 3), (1, 4)])  # one shape, one program
def test_padding_on_either_side_changes_no_prediction(predict, before, after):
    batch = histories(2)
    np.testing.assert_allclose(predict(padded(batch, before, after)), predict(batch), atol=1e-5)


def test_longer_histories_in_the_batch_change_no_prediction(predict):
    short, long = padded(histories(2), 5, 0), histories(3, FRAMES + 5, seed=1)
    together = {name: np.concatenate([short[name], long[name]]) for name in short}
    np.testing.assert_allclose(predict(together)[:2], predict(histories(2)), atol=1e-5)


def test_the_last_valid_frame_and_its_wind_change_the_prediction(predict):
    batch = histories(2)
    for name, other in (("fire", ~batch["fire"]), ("wind", 1 - batch["wind"])):
        changed = {**batch, name: np.concatenate([batch[name][:, :-1], other[:, -1:]], axis=1)}
        assert np.abs(predict(padded(changed, 5, 0)) - predict(batch)).max() > 1e-3


def test_time_counts_backwards_from_the_last_valid_frame():
    valid = np.array([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0]], bool)
    assert last_valid(jnp.asarray(valid)).tolist() == [4, 2]
    left, right = time_embedding(jnp.asarray(valid), 8)
    np.testing.assert_allclose(left[2:], right[:3], atol=1e-6)
    np.testing.assert_allclose(left[4], [0, 0, 0, 0, 1, 1, 1, 1], atol=1e-6)
    np.testing.assert_allclose(left[3, [0, 4]], [np.sin(1), np.cos(1)], atol=1e-6)


@pytest.mark.parametrize(
    "name, millions", [("emberformer_small", 3.7), pytest.param("emberformer", 27, marks=pytest.mark.slow)]
)
def test_the_decoders_of_the_published_sizes(name, millions):
    """Without the 150 classes of the published ones, and with tokens instead of colours as their input."""
    config = load_config(name)
    model = nnx.eval_shape(lambda: EmberFormer(config.model, 3, rngs=init_rngs(0)))
    size, width = SIZES[config.model.decoder_size], config.model.width
    count = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model.decoder, nnx.Param)))
    count += 149 * (size.head_width + 1) - 49 * (width - 3) * size.widths[0]
    assert count / 1e6 == pytest.approx(millions, rel=0.02)


def test_public_weights_come_without_classifier_from_a_directory_or_a_file():
    saved, _ = load_segformer(SEGFORMER)
    size = _size_of(saved)
    for path in (SEGFORMER, SEGFORMER / "model.safetensors"):
        params, stats, notes = segformer_variables(path, size, channels=8)
        np.testing.assert_array_equal(params["head"]["fuse"], saved.head.fuse[...])
        np.testing.assert_array_equal(stats["head"]["norm"]["var"], saved.head.norm.var[...])
        assert params["encoder"]["stages"][0]["embed"]["kernel"].shape[2] == 8 and "classifier" not in params["head"]
        assert "from 3 to 8 channels" in " ".join(notes) and "model.safetensors" in notes[0]
    with pytest.raises(UserError, match="config.json: the weights are of"):
        segformer_variables(SEGFORMER, dataclasses.replace(size, head_width=7), channels=8)
    with pytest.raises(UserError, match="give the directory with config.json"):
        load_segformer(SEGFORMER / "model.safetensors")


def _size_of(saved):
    stages = saved.encoder.stages
    return dataclasses.replace(
        SIZES["b0"],
        widths=tuple(stage.norm.num_features for stage in stages),
        depths=tuple(len(stage.blocks) for stage in stages),
        head_width=saved.head.fuse.shape[1],
        heads=tuple(stage.blocks[0].attention.heads for stage in stages),
        reductions=tuple(stage.blocks[0].attention.reduction for stage in stages),
        mlp_ratios=tuple(stage.blocks[0].up.out_features // stage.norm.num_features for stage in stages),
    )
