"""Fine-tuning: the whole encoder learns, choices are made on held-out images, and it beats the linear probe."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jepa_jax.data.sources import open_source, subset
from jepa_jax.evals.features import extract
from jepa_jax.evals.fine_tune import (
    TunableEncoder,
    fine_tune,
    fitting_batch,
    jitter_position,
    num_steps,
    relative_change,
    train_mode,
)
from jepa_jax.evals.linear_probe import linear_probe
from jepa_jax.program.build import build_program
from jepa_jax.program.step import make_feature_step, make_statistics_step
from jepa_jax.program.variables import with_variables
from jepa_jax.runtime.mesh import batch_sharding, make_mesh
from tests.tiny import tiny_config

EPOCHS = 4


@pytest.fixture(scope="module")
def tuned():
    """A small untrained encoder on the embedded shapes, its probe, and what fine-tuning makes of it."""
    config = tiny_config(
        data__image_size=24, data__num_train=1024, data__num_test=512, model__stride=2, model__widths=(64, 64, 64),
        model__stem_width=24,
    )  # fmt: skip
    mesh = make_mesh(1, 1)
    sources = open_source(config.data, "train"), open_source(config.data, "test")
    sample = sources[0].batch(np.arange(512))
    program = build_program(config, num_train=1024, num_classes=10, sample=sample, mesh=mesh)
    state = program.factory.create(0, sample)
    encode, sharding = make_feature_step(program.method, program.factory, mesh), batch_sharding(mesh)

    def features(params, stats, source):
        return extract(lambda x: encode(params, stats, x), source, batch_size=128, sharding=sharding)

    params = state.params["model"]
    statistics = make_statistics_step(program.method, program.factory, mesh)(params, state.stats, sample)
    stats = with_variables(state.stats, statistics)
    encoder = TunableEncoder(params, stats, train_mode(program, 0), features)
    train, test = (features(params, stats, source) for source in sources)
    result = fine_tune(encoder, sources, train, 10, epochs=EPOCHS, flip=True, sharding=sharding)
    return params, result, linear_probe(train, test, 10)


def test_the_encoder_changes(tuned):
    before, result, _ = tuned
    kernels = jax.tree.leaves(jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), before, result.params)["encoder"])
    assert min(kernels) > 0  # every array of it
    assert result.encoder_change > 1e-3


def test_it_beats_the_linear_probe(tuned):
    _, result, probe = tuned
    assert result.accuracy > probe.accuracy


def test_the_epoch_is_the_best_on_held_out_images(tuned):
    _, result, _ = tuned
    assert len(result.held_out_accuracies) == EPOCHS
    assert result.epoch == 1 + int(np.argmax(result.held_out_accuracies))
    assert (result.train_images, result.steps) == (922, num_steps(1024, EPOCHS))


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
