"""Average precision, readouts of maps, and the pictures that they give."""

import numpy as np
import pytest

from jepa_jax.projects.world_models.evals.cells import (
    average_precision,
    cell_pixels,
    fit_cells,
    frames_of,
    neighbourhoods,
)
from jepa_jax.projects.world_models.evals.rollout import (
    COPY_LAST,
    ENCODED,
    MODEL,
    Latents,
    detection_scores,
    position_scores,
)

RNG = np.random.default_rng(0)


def test_average_precision_is_the_mean_precision_at_each_positive():
    truth = np.array([1, 0, 1, 1, 0], bool)
    assert average_precision(np.array([5.0, 4, 3, 2, 1]), truth) == pytest.approx((1 + 2 / 3 + 3 / 4) / 3)
    assert average_precision(np.zeros(5), truth) == pytest.approx(3 / 5)  # equal scores: the share of positives
    assert average_precision(np.zeros(5), np.zeros(5, bool)) is None


def test_neighbourhoods_have_zeros_beyond_the_border():
    maps = np.arange(1, 10, dtype=np.float32).reshape(1, 3, 3, 1)
    found = neighbourhoods(maps)
    np.testing.assert_array_equal(found[0, 1, 1], np.arange(1, 10))
    np.testing.assert_array_equal(found[0, 0, 0], [0, 0, 0, 0, 1, 2, 0, 4, 5])


def test_pixels_of_cells_are_put_back_where_they_were():
    frames = RNG.integers(0, 256, (3, 8, 8, 2), np.uint8)
    np.testing.assert_array_equal(frames_of(cell_pixels(frames, 4), (8, 8, 2)), frames)


def test_a_readout_finds_a_linear_map_of_neighbours():
    latents = RNG.normal(size=(60, 4, 4, 3)).astype(np.float32)
    weights = RNG.normal(size=(27, 2)).astype(np.float32)
    targets = neighbourhoods(latents) @ weights
    new = RNG.normal(size=(2, 5, 4, 4, 3)).astype(np.float32)
    expected = neighbourhoods(new.reshape(-1, 4, 4, 3)) @ weights
    np.testing.assert_allclose(fit_cells(latents, targets)(new).reshape(expected.shape), expected, atol=0.05)


def test_perfect_latents_score_1_and_old_ones_less():
    """Latents that are the detection map itself, of one figure that walks along a row."""
    count, times = 64, 6
    rows, starts = RNG.integers(0, 8, count), RNG.integers(0, 3, count)
    maps = np.zeros((count, times, 8, 8), bool)
    for t in range(times):
        maps[np.arange(count), t, rows, starts + t] = True
    latents = maps[..., None].astype(np.float32)
    states = np.stack([starts[:, None] + np.arange(times), np.repeat(rows[:, None], times, axis=1)], -1)
    data = {"detections": maps, "states": states.astype(np.float32)}
    known = Latents(latents, latents[:, 2:], data)
    detections, positions = detection_scores(known, known), position_scores(known, known)
    assert min(detections[MODEL]) > 0.99 and detections[MODEL] == detections[ENCODED]
    assert max(detections[COPY_LAST][1:]) < 0.1 and detections[COPY_LAST][0] < 0.9
    assert min(positions[MODEL]) > 0.99 and positions[COPY_LAST][-1] < positions[COPY_LAST][0] < 0.99
