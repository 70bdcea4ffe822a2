"""Boosted trees of single pixels: what they see, that they repeat, and that they learn which way the wind blows."""

import numpy as np
import pytest

from jepa_jax.data.in_memory import InMemorySource
from jepa_jax.projects.wildfire.data.element import fire_element, stacked
from jepa_jax.projects.wildfire.evals.baselines import fit_logistic, read_reference
from jepa_jax.projects.wildfire.evals.boosting import fit_boosting, neighbourhood_features, ways
from jepa_jax.projects.wildfire.evals.truth import ranking_figures

BLOWS = {0.0: (1, 0), 0.25: (0, -1), 0.5: (-1, 0), 0.75: (0, 1)}  # rows and columns, by where the wind comes from


def blown(count, seed):
    """Fires that spread by one pixel with the wind, and where the wind is weak not at all."""
    rng = np.random.default_rng(seed)
    elements = []
    for number in range(count):
        first = rng.random((16, 16)) < 0.05
        second = first | (rng.random((16, 16)) < 0.03)
        comes_from, speed = rng.choice(list(BLOWS)), rng.choice([0.1, 0.9])
        row, column = BLOWS[comes_from]
        reached = np.zeros_like(second)
        reached[max(row, 0) : 16 + min(row, 0), max(column, 0) : 16 + min(column, 0)] = second[
            max(-row, 0) : 16 + min(-row, 0), max(-column, 0) : 16 + min(-column, 0)
        ]
        target = second | (reached & (speed > 0.5))
        wind, static = np.array([[0.5, 0.1], [speed, comes_from]]), rng.random((16, 16, 1))
        elements.append(fire_element(np.stack([first, second]), wind, static, target, fire_id=number, frames=3))
    return InMemorySource(lambda: stacked(elements))


@pytest.fixture(scope="module")
def trees():
    return fit_boosting(blown(160, 0))


def test_they_learn_which_way_the_wind_blows(trees):
    test = blown(40, 1)
    reference = read_reference(test, {"boosting": trees, "logistic": fit_logistic(blown(160, 0))})
    new = {
        name: ranking_figures(reference.scores(name), reference.truth)["new_average_precision"]
        for name in ("persistence", "dilation", "logistic", "boosting")
    }
    assert new["boosting"] > 0.95 and new["persistence"] < 0.1
    assert new["boosting"] > 0.1 + max(new["dilation"], new["logistic"])


def test_fits_are_repeatable_and_depend_on_their_data(trees):
    batch = blown(4, 2).batch(np.arange(4))
    again, other = fit_boosting(blown(160, 0)), fit_boosting(blown(160, 3))
    np.testing.assert_array_equal(again(batch), trees(batch))
    assert np.abs(other(batch) - trees(batch)).max() > 0.1


def test_features_of_a_pixel_by_hand():
    fire = np.zeros((1, 3, 8, 8, 1), bool)
    fire[0, 1:, 2, 3] = fire[0, 2, 5, 5] = True
    static = np.arange(64, dtype=np.float32).reshape(1, 8, 8, 1) / 64
    batch = {"fire": fire, "static": static, "wind": np.array([[[0, 0], [0, 0], [0.5, 0.25]]], np.float32)}
    features = neighbourhood_features(batch)[0, 3, 4]  # of row 3 and column 4, one south and one east of a fire
    np.testing.assert_array_equal(features[:9].reshape(3, 3), [[1, 0, 0], [0, 0, 0], [0, 0, 0]])
    ages = np.zeros((5, 5))
    ages[1, 1], ages[4, 3] = 2, 1
    np.testing.assert_array_equal(features[9:34].reshape(5, 5), ages)
    row, column, length, along, speed, south, east = features[34:41]
    assert (row, column) == (1, 1) and length == pytest.approx(np.sqrt(2)) and speed == 0.5
    assert south == pytest.approx(0, abs=1e-6) and east == pytest.approx(-0.5)  # an east wind blows westwards
    assert along == pytest.approx(-0.5 / np.sqrt(2))
    upwind = np.zeros((5, 3))
    upwind[0, 0] = 1 / 2  # the fire one pixel west (downwind) and one north has burned for two frames
    np.testing.assert_allclose(features[43:-3], np.delete(upwind, 4), atol=1e-6)  # without the pixel itself
    np.testing.assert_allclose(features[-3:], [28 / 64, 8 / 64, 1 / 64])


def test_ways_lead_from_the_nearest_fire():
    burning = np.zeros((2, 5, 7), bool)
    burning[0, 1, 2] = burning[0, 4, 6] = True
    way = ways(burning)
    assert way[0, 1, 4].tolist() == [0, 2] and way[0, 4, 5].tolist() == [0, -1] and not way[1].any()
