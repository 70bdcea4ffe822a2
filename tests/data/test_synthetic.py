"""The embedded shapes: deterministic by index, balanced, and with colours that say nothing about the class."""

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jepa_jax.base.errors import UserError
from jepa_jax.config.groups import DataConfig
from jepa_jax.data import synthetic
from jepa_jax.data.contract import image_spec
from jepa_jax.data.sources import open_source


def shapes(count, **kwargs):
    drawn = synthetic.render_shapes(np.arange(count), **{"size": 32, "seed": 0, "split": "train", **kwargs})
    return drawn["image"], drawn["label"]


def config(**kwargs):
    return DataConfig(**{"source": "shapes", "num_train": 40, "num_test": 20, "seed": 3} | kwargs)


@settings(max_examples=10)
@given(st.lists(st.integers(0, 10_000), min_size=1, max_size=9), st.sampled_from([8, 17, 32]), st.integers(0, 2**63))
def test_an_image_depends_on_its_index_alone(indices, size, seed):
    def render(numbers):
        drawn = synthetic.render_shapes(np.array(numbers), size=size, seed=seed, split="train")
        return drawn["image"], drawn["label"]

    images, labels = render(indices)
    for place, index in enumerate(indices):
        alone, label = render([index])
        np.testing.assert_array_equal(images[place], alone[0])
        assert labels[place] == label[0] == index % 10


def test_large_sets_cross_chunk_borders_unchanged(monkeypatch):
    whole, _ = shapes(50)
    monkeypatch.setattr(synthetic, "CHUNK_PIXELS", 7 * 32 * 32)
    np.testing.assert_array_equal(shapes(50)[0], whole)


def test_seed_split_and_index_each_change_the_image():
    reference, _ = shapes(20)
    assert reference.shape == (20, 32, 32, 3) and reference.dtype == np.uint8
    for other in (shapes(20, seed=1)[0], shapes(20, split="test")[0]):
        assert (reference != other).reshape(20, -1).any(1).all()
    assert len({image.tobytes() for image in reference}) == 20


def test_classes_are_balanced_and_every_motif_is_visible(monkeypatch):
    _, labels = shapes(100)
    np.testing.assert_array_equal(np.bincount(labels), np.full(10, 10))
    for name in ("CHROMA", "LIGHTING", "NOISE"):
        monkeypatch.setattr(synthetic, name, 0)
    images, labels = shapes(200)
    ink_range = np.ptp(images.reshape(200, -1).astype(int), axis=1)
    assert (ink_range >= 0.35 * 255 - 2).all()  # at least the smallest contrast between motif and ground


def test_figures_have_similar_areas_inside_the_unit_disc_and_patterns_cover_half_a_tile():
    axis = np.linspace(-1, 1, 400)
    u, v = np.meshgrid(axis, axis)
    for name, distance in synthetic.MOTIFS.items():
        inside = distance(u, v) < 0
        if name in synthetic.TILED:
            assert 0.47 < inside.mean() < 0.53, name
        else:
            assert 1.0 < inside.mean() * 4 < 1.8, name
            assert np.hypot(u, v)[inside].max() < 1.12, name


def test_patterns_continue_across_tiles():
    edge = np.linspace(-1, 1, 101)
    for name in synthetic.TILED:
        distance = synthetic.MOTIFS[name]
        for left, right in ((distance(-1, edge), distance(1, edge)), (distance(edge, -1), distance(edge, 1))):
            np.testing.assert_allclose(left, right, atol=1e-6, err_msg=name)


def test_mean_colour_says_nothing_about_the_class():
    images, labels = shapes(6000, size=16)
    mean = images.mean((1, 2))  # [N, 3]
    spread = mean.std(0)
    by_class = np.stack([mean[labels == label].mean(0) for label in range(10)])
    # 600 images a class: the means of classes scatter by spread / sqrt(600) when colour is independent of the class.
    assert (np.abs(by_class - mean.mean(0)) < 4.5 * spread / np.sqrt(600)).all()


def test_raw_pixels_are_near_chance():
    images, labels = shapes(2500, size=16)
    x = images.reshape(len(images), -1) / 255.0
    x = np.c_[x - x[:2000].mean(0), np.ones(len(x))]
    weights = np.linalg.solve(x[:2000].T @ x[:2000] + 30 * np.eye(x.shape[1]), x[:2000].T @ np.eye(10)[labels[:2000]])
    accuracy = ((x[2000:] @ weights).argmax(1) == labels[2000:]).mean()
    assert accuracy < 0.25


def test_shapes_kept_in_memory_equal_shapes_drawn_on_demand(monkeypatch):
    indices = np.array([5, 39, 5])
    kept = open_source(config(), "train")
    expected = kept.batch(indices)
    assert expected["label"].dtype == np.int32 and expected["label"].tolist() == [5, 9, 5]
    for memory in (synthetic.MEMORY_LIMIT_BYTES, 0):
        monkeypatch.setattr(synthetic, "MEMORY_LIMIT_BYTES", memory)
        source = pickle.loads(pickle.dumps(kept))
        assert len(source) == 40 and source.spec == image_spec(32) and len(source.classes) == 10
        np.testing.assert_array_equal(source.batch(indices)["image"], expected["image"])
        assert len(pickle.dumps(source)) < 1000


@pytest.mark.parametrize(
    ("change", "message"),
    [({"num_train": 0}, "data.num_train = 0"), ({"image_size": 4}, "= 4"), ({"channels": 1}, "data.channels = 1")],
)
def test_impossible_sets_are_refused(change, message):
    with pytest.raises(UserError, match=message):
        open_source(config(**change), "train")
