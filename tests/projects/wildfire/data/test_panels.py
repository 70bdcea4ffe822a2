"""Maps of fires: each case has its colour, for arrays of numpy and of jax alike."""

import jax
import jax.numpy as jnp
import numpy as np

from jepa_jax.projects.wildfire.data.panels import (
    BURNT,
    FALSE_ALARM,
    HISTORY,
    IGNITED,
    LEGEND,
    PANELS,
    PREDICTED,
    UNKNOWN,
    as_pixels,
    element_panels,
    error_map,
    frame_map,
    ground,
    probability_map,
)

STATIC = np.zeros((1, 6, 2), np.float32)
WHITE = (255, 255, 255)


def row(*bits):
    return np.array([bits], bool)


def colours(picture):
    return [tuple(pixel) for pixel in as_pixels(picture)[0].tolist()]


def element(frames, length, seed=0):
    """Returns a batch of one element whose history has `length` valid frames of `frames`."""
    rng = np.random.default_rng(seed)
    valid = np.arange(frames) >= frames - length
    fire = np.maximum.accumulate(rng.random((frames, 4, 4)) < 0.2, axis=0) & valid[:, None, None]
    target = fire[-1] | (rng.random((4, 4)) < 0.4)
    known, static = rng.random((4, 4, 1)) < 0.8, rng.random((4, 4, 3), np.float32)
    one = {"fire": fire[..., None], "valid": valid, "target": target[..., None], "known": known, "static": static}
    return {name: array[None] for name, array in one.items()}


def test_every_kind_of_error_has_its_colour():
    before, target, predicted = row(1, 0, 0, 0, 0, 1), row(1, 1, 1, 0, 0, 1), row(1, 1, 0, 1, 0, 0)
    terrain = ground(STATIC)
    shown = colours(error_map(terrain, before, target, row(1, 1, 1, 1, 1, 1), predicted))
    assert shown == [BURNT, PREDICTED, IGNITED, FALSE_ALARM, colours(terrain)[0], IGNITED]
    assert set(colours(error_map(terrain, before, target, row(0, 0, 0, 0, 0, 0), predicted))) == {UNKNOWN}


def test_frames_tell_apart_what_newly_burns():
    shown = colours(frame_map(ground(STATIC), row(1, 0, 0, 1, 0, 0), row(1, 1, 0, 0, 0, 0)))
    nothing = colours(ground(STATIC))[0]
    assert shown == [BURNT, IGNITED, nothing, nothing, nothing, nothing]


def test_probabilities_are_opacity():
    terrain = ground(STATIC)
    probability = np.array([[0, 0.5, 1, 1, 0.25, 0]], np.float32)
    shown = np.array(colours(probability_map(terrain, row(0, 0, 0, 1, 1, 1), probability)), float)
    first = terrain[0, 0]
    assert np.abs(shown[1] - (first + PREDICTED) / 2).max() <= 0.5 and tuple(shown[2]) == PREDICTED
    assert tuple(shown[3]) == BURNT and np.abs(shown[4] - (0.75 * first + 0.25 * np.array(BURNT))).max() <= 0.5
    assert (shown[[0, 5]] == first).all()


def test_terrain_is_faint_and_colours_are_far_apart():
    grey = as_pixels(ground(np.linspace(0, 1, 12, dtype=np.float32).reshape(1, 6, 2)))
    assert grey.min() > 180 and grey.max() < 255
    seen = np.array([*LEGEND, (220, 220, 220)], float)
    luminance = seen @ (0.2126, 0.7152, 0.0722)
    blue = seen[:, 2]  # what remains of hue without red-green vision
    apart = np.hypot(luminance[:, None] - luminance, blue[:, None] - blue) + 1e9 * np.eye(len(seen))
    assert apart.min() > 30


def test_a_short_history_leaves_its_first_panels_white():
    probability = np.full((1, 4, 4), 0.9, np.float32)
    for frames, length in [(5, 2), (2, 2), (1, 1)]:
        panels = element_panels(element(frames, length), probability)
        assert len(panels) == len(PANELS) and all(panel.shape == (1, 4, 4, 3) for panel in panels)
        white = [(panel == 255).all() for panel in panels]
        assert white == [True] * (HISTORY - length) + [False] * (len(PANELS) - HISTORY + length)


def test_the_first_frame_of_a_history_shows_nothing_as_newly_burning():
    panels = element_panels(element(5, 2), np.zeros((1, 4, 4), np.float32))
    first, second = (np.all(panels[i] == IGNITED, axis=-1) for i in (1, 2))
    batch = element(5, 2)["fire"][0, ..., 0]
    assert not first.any()
    np.testing.assert_array_equal(second[0], batch[4] & ~batch[3])


def test_traced_arrays_are_drawn_like_those_of_numpy():
    batch = element(5, 4)
    probability = np.random.default_rng(1).random((1, 4, 4), np.float32)
    expected = np.stack(element_panels(batch, probability))
    drawn = jax.jit(lambda b, p: jnp.stack(element_panels(b, p)))(batch, probability)
    assert drawn.dtype == expected.dtype == np.uint8
    assert np.abs(np.asarray(drawn, int) - expected).max() <= 1  # rounding
