"""Fine-tuning: the whole encoder learns, choices are made on held-out images, and it beats the linear probe."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jepa_jax.data.sources import open_splits
from jepa_jax.data.subset import subset
from jepa_jax.evals.fine_tune import fine_tune, fitting_batch, jitter_position, relative_change
from jepa_jax.evals.inference import FrozenEncoder
from jepa_jax.evals.linear_probe import linear_probe
from jepa_jax.program.build import build_program
from jepa_jax.runtime.mesh import make_mesh
from tests.tiny import tiny_config

EPOCHS = 4


@pytest.fixture(scope="module")
def tuned():
    """A small untrained encoder on the embedded shapes, its probe, and what fine-tuning makes of it."""
    config = tiny_config(
        data__image_size=24, data__num_train=1024, data__num_test=512, model__stride=2, model__widths=(64, 64, 64),
        model__stem_width=24, eval__batch_size=128,
    )  # fmt: skip
    sources = open_splits(config.data)
    sample = sources[0].batch(np.arange(512))
    program = build_program(config, num_train=1024, num_classes=10, sample=sample, mesh=make_mesh(1, 1))
    state = program.factory.create(0, sample)
    encoder = FrozenEncoder(config, program, state.params["model"], state.stats, splits=sources)
    encoder = encoder.calibrated(sources[0], 512)
    train, test = encoder.features()
    begun, steps = [], []
    result, params = fine_tune(encoder, sources, train, epochs=EPOCHS, start=begun.append, on_step=steps.append)
    assert begun == [sum(steps)] == [result["steps"]]  # what a progress bar shows
    return encoder.params, params, result, linear_probe(train, test, 10)


@pytest.mark.slow
def test_the_encoder_changes(tuned):
    before, params, result, _ = tuned
    kernels = jax.tree.leaves(jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), before, params)["encoder"])
    assert min(kernels) > 0  # every array of it
    assert result["encoder_change"] > 1e-3


@pytest.mark.slow
def test_it_beats_the_linear_probe(tuned):
    _, _, result, probe = tuned
    assert result["accuracy"] > probe["accuracy"]


@pytest.mark.slow
def test_the_epoch_is_the_best_on_held_out_images(tuned):
    _, _, result, _ = tuned
    assert len(result["held_out_accuracies"]) == EPOCHS
    assert result["epoch"] == 1 + int(np.argmax(result["held_out_accuracies"]))
    assert (result["train_images"], result["steps"]) == (922, EPOCHS * (922 // fitting_batch(922)))


def test_light_augmentation_only_moves_pixels():
    images = np.random.default_rng(0).integers(0, 255, (32, 16, 16, 3), np.uint8)
    moved = np.asarray(jitter_position(jax.random.key(0), images, flip=False))
    assert moved.dtype == np.uint8 and moved.shape == images.shape
    padded = np.pad(images, ((0, 0), (2, 2), (2, 2), (0, 0)), mode="edge")
    places = [
        [(y, x) for y in range(5) for x in range(5) if (padded[i, y : y + 16, x : x + 16] == moved[i]).all()]
        for i in range(len(images))
    ]
    assert all(places) and len({place[0] for place in places}) > 10
    mirrored = np.asarray(jitter_position(jax.random.key(0), images, flip=True))
    as_drawn = (mirrored == moved).all(axis=(1, 2, 3))
    turned = (mirrored == moved[:, :, ::-1]).all(axis=(1, 2, 3))
    assert (as_drawn | turned).all() and 4 < turned.sum() < 28


def test_batches_fit_small_sets_and_devices():
    assert fitting_batch(100_000) == 128
    assert fitting_batch(576) == 72
    assert fitting_batch(5) == 5
    assert fitting_batch(100, multiple=8) == 8


def test_relative_change():
    before = {"a": jnp.array([3.0, 0.0]), "b": jnp.array([4.0])}
    after = {"a": jnp.array([3.0, 0.5]), "b": jnp.array([4.0])}
    assert relative_change(before, after) == pytest.approx(0.1)


def test_a_subset_keeps_order():
    class Numbers:
        classes, spec = ("a",), {"label": jax.ShapeDtypeStruct((), np.int32)}

        def batch(self, indices):
            return {"label": indices}

    part = subset(Numbers(), np.array([4, 2, 9]))
    assert len(part) == 3
    assert part.batch(np.array([2, 0]))["label"].tolist() == [9, 4]
