"""`load_encoder`: what it says of itself, features as they were measured, patches where there is a grid."""

import dataclasses
import signal

import jax
import numpy as np
import pytest

from jepa_jax import load_encoder
from jepa_jax.base.classes import trust_files
from jepa_jax.base.errors import UserError
from jepa_jax.base.signals import Interrupted
from jepa_jax.evals.inference import load_run
from jepa_jax.program.checkpoint import Checkpoints
from tests.evals.untrained_run import write_run
from tests.runs import Silent, unlabelled
from tests.runs import run as train_tiny
from tests.tiny import tiny_config, tiny_masked_config

IMAGES = np.random.default_rng(0).integers(0, 256, (11, 16, 16, 3), np.uint8)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inference") / "run"
    write_run(tiny_config(eval__calibration_images=0), folder)
    return folder


def test_an_encoder_says_what_it_takes_and_gives(run):
    encoder = load_encoder(run, batch_size=8)
    assert (encoder.image_size, encoder.channels, encoder.feature_dim) == (16, 3, 16)
    features = encoder(IMAGES)
    assert features.shape == (11, 16) and features.dtype == np.float32
    np.testing.assert_allclose(features[3:5], encoder(IMAGES[3:5]), rtol=1e-5, atol=1e-6)
    assert encoder(IMAGES[:0]).shape == (0, 16)


def test_its_features_are_those_that_evaluations_read(run):
    evaluated = load_run(run).encoder
    images = evaluated.test.batch(np.arange(len(evaluated.test)))["image"]
    expected = evaluated.test_features().features
    np.testing.assert_allclose(load_encoder(run)(images), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_an_unfinished_run_gives_what_was_evaluated(tmp_path):
    """Trained on crops of 8 of 16 pixels, and interrupted: its batch statistics are not those of crops."""

    class Stops(Silent):
        def line(self, text):
            super().line(text)
            if text.startswith("epoch 1/"):
                signal.raise_signal(signal.SIGTERM)

    with pytest.raises(Interrupted):
        train_tiny(tmp_path, Stops(), data__augment__crop__size=8, eval__calibration_images=96)
    loaded = load_run(tmp_path)
    evaluated = loaded.encoder
    assert loaded.state.step == 6
    expected = evaluated.calibrated(evaluated.train, 96)(IMAGES)
    for encoder in (load_encoder(tmp_path), evaluated):
        np.testing.assert_allclose(encoder(IMAGES), expected, rtol=1e-4, atol=1e-4)
    with Checkpoints(tmp_path / "checkpoints", read_only=True) as checkpoints:
        state, _ = checkpoints.restore(evaluated.program.factory.abstract)
    crops = evaluated.with_weights(evaluated.params, state.stats)(IMAGES)  # what training continues with
    assert np.linalg.norm(crops - expected) > 0.05 * np.linalg.norm(expected)


@pytest.mark.parametrize(
    "images, given",
    [
        (IMAGES.astype(np.float32), r"float32 \(11, 16, 16, 3\)"),
        (IMAGES[:, :8], r"uint8 \(11, 8, 16, 3\)"),
        (IMAGES[..., :1], r"uint8 \(11, 16, 16, 1\)"),
        (IMAGES[0], r"uint8 \(16, 16, 3\)"),
    ],
)
def test_other_images_are_refused(run, images, given):
    with pytest.raises(UserError, match=rf"images: {given}; this encoder takes uint8 \[N, 16, 16, 3\]"):
        load_encoder(run)(images)


def test_an_encoder_without_a_grid_has_no_patch_tokens(run):
    with pytest.raises(UserError, match="patch_tokens: this encoder has no grid of patches; use a ViT"):
        load_encoder(run).patch_tokens(IMAGES)


def test_patch_tokens_of_a_vit_lie_where_the_patches_lie(tmp_path):
    write_run(tiny_masked_config("ijepa"), tmp_path / "run")
    encoder = load_encoder(tmp_path / "run", batch_size=8)
    tokens = encoder.patch_tokens(IMAGES)
    assert tokens.shape == (11, 8, 8, encoder.feature_dim) and tokens.dtype == np.float32
    np.testing.assert_allclose(encoder.patch_tokens(IMAGES[9:]), tokens[9:], rtol=1e-4, atol=1e-5)
    changed = IMAGES.copy()
    changed[:, 4:6, 10:12] = 255 - changed[:, 4:6, 10:12]  # the patch in row 2, column 5
    difference = np.abs(encoder.patch_tokens(changed) - tokens).max(axis=(0, 3))
    assert np.unravel_index(difference.argmax(), difference.shape) == (2, 5)
    assert encoder(IMAGES).shape == (11, encoder.feature_dim)


def test_grey_images_without_labels(tmp_path):
    write_run(tiny_config(**unlabelled(tmp_path, channels=1)), tmp_path / "run")
    encoder = load_encoder(tmp_path / "run", batch_size=8)
    assert encoder.channels == 1 and encoder(IMAGES[..., :1]).shape == (11, 16)


def test_the_target_has_its_own_weights_and_statistics(tmp_path, byol):
    """Only the target's statistics differ from those of the online network: so do the features that are read."""

    def shifted(state):
        moved = jax.tree.map(lambda leaf: leaf + 1, state.target_stats)
        return dataclasses.replace(state, target_stats=moved)

    features = {}
    for weights in ("online", "target"):
        config = tiny_config(**byol, eval__weights=weights, eval__calibration_images=0)
        state = write_run(config, tmp_path / weights, shifted)
        assert set(state.target_stats) == {"encoder", "projector"}
        with trust_files():  # whose config.json names byol:Byol
            features[weights] = load_encoder(tmp_path / weights)(IMAGES)
            evaluated = load_run(tmp_path / weights).encoder
        expected = state.target_stats if weights == "target" else state.stats
        jax.tree.map(np.testing.assert_array_equal, evaluated.stats["encoder"], expected["encoder"])
        jax.tree.map(np.testing.assert_array_equal, evaluated.stats["predictor"], state.stats["predictor"])
    assert np.abs(features["target"] - features["online"]).max() > 1e-2
