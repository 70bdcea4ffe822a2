"""Pictures of images with any number of channels."""

import numpy as np
import pytest
from PIL import Image

from jepa_jax.data.pictures import GAP, ZOOM_TO, grid, rgb, save_views, view_grid


@pytest.mark.parametrize(
    ("pixel", "shown"),
    [
        ((80,), (80, 80, 80)),
        ((80, 9), (80, 80, 80)),
        ((1, 2, 3), (1, 2, 3)),
        ((200, 100, 0, 255), (200, 100, 0)),
        ((200, 100, 0, 0), (255, 255, 255)),
        ((200, 100, 0, 51), (244, 224, 204)),
        ((1, 2, 3, 4, 5), (1, 2, 3)),
    ],
)
def test_channels_are_shown_as_colours(pixel, shown):
    assert rgb(np.uint8([[pixel]])).tolist() == [[list(shown)]]


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_views_are_shown_beside_their_image(tmp_path, channels):
    images = np.full((2, 8, 8, channels), 255, np.uint8)
    images[..., 0] = 40
    mean, std = (0.5,) * channels, (0.25,) * channels
    views = np.stack([(images / 255 - mean) / std] * 3)  # as they are
    save_views(tmp_path / "views.png", images, views, mean, std)
    picture = np.asarray(Image.open(tmp_path / "views.png"))
    step = ZOOM_TO + GAP
    assert picture.shape == (2 * step + GAP, 4 * step + GAP, 3)
    tiles = picture[GAP + ZOOM_TO // 2 :: step, GAP + ZOOM_TO // 2 :: step]
    assert (tiles == ([40, 40, 40] if channels == 1 else [40, 255, 255])).all()
    assert grid([[images[0]]]).shape == (step + GAP, step + GAP, 3)


def test_pixels_are_shown_as_they_are_and_floats_are_normalised():
    pixels = np.random.default_rng(0).integers(0, 256, (2, 1, 8, 8, 3), np.uint8)
    mean, std = (0.4, 0.5, 0.6), (0.2, 0.1, 0.3)
    shown = view_grid(pixels, (0.5,) * 11, (0.2,) * 11)  # of data with other channels, which do not matter here
    np.testing.assert_array_equal(shown, view_grid((pixels / 255 - mean) / std, mean, std))
    assert shown.shape[0] >= ZOOM_TO
