"""Pictures of what a method sees."""

import io
import pathlib
from typing import Any

import jax
import numpy as np
from PIL import Image

from jepa_jax.base.files import write_atomically

ZOOM_TO = 96  # pixels a side that small images are enlarged to
GAP = 4


def save_views(path: pathlib.Path, images: np.ndarray, views: np.ndarray, mean: Any, std: Any) -> None:
    """A PNG with a row an image: the original, then its normalised views [V, B, h, w, 3]."""
    pixels = np.moveaxis(denormalised(views, mean, std), 1, 0)
    write_atomically(path, png(grid([[image, *views_of] for image, views_of in zip(images, pixels, strict=True)])))


def view_grid(views: np.ndarray, mean: Any, std: Any) -> np.ndarray:
    """Normalised views [V, B, h, w, 3] as one uint8 image with a row an image."""
    return grid([list(views_of) for views_of in np.moveaxis(denormalised(views, mean, std), 1, 0)])


def denormalised(views: np.ndarray, mean: Any, std: Any) -> np.ndarray:
    """Normalised pixels as uint8."""
    return np.clip((np.asarray(views) * np.asarray(std) + np.asarray(mean)) * 255 + 0.5, 0, 255).astype(np.uint8)


def grid(rows: list[list[np.ndarray]]) -> np.ndarray:
    """Images of any size side by side on white, each enlarged to the same side by whole pixels where it fits."""
    side = max(ZOOM_TO, *(image.shape[0] for row in rows for image in row))
    step = side + GAP
    canvas = np.full((len(rows) * step + GAP, max(map(len, rows)) * step + GAP, 3), 255, np.uint8)
    for y, row in enumerate(rows):
        for x, image in enumerate(row):
            tile = np.asarray(Image.fromarray(image).resize((side, side), Image.Resampling.NEAREST))
            canvas[GAP + y * step : GAP + y * step + side, GAP + x * step : GAP + x * step + side] = tile
    return canvas


def png(image: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, format="PNG", optimize=True)
    return buffer.getvalue()


def example_views(method: Any, images: np.ndarray) -> np.ndarray:
    """The views that a method makes of these images at step 0 of seed 0."""
    return np.asarray(jax.jit(method.example_views)(images, jax.random.key(0)))
