"""Pictures of what a method sees."""

import io
import pathlib
from collections.abc import Sequence

import numpy as np
from PIL import Image

from jepa_jax.base.files import write_atomically

ZOOM_TO = 96  # pixels per side that small images are enlarged to
GAP = 4


def save_views(
    path: pathlib.Path, images: np.ndarray, views: np.ndarray, mean: Sequence[float], std: Sequence[float]
) -> None:
    """Writes a PNG with one row per image: the original, then its normalised views [V, B, h, w, C]."""
    pixels = np.moveaxis(denormalised(views, mean, std), 1, 0)
    write_atomically(path, png(grid([[image, *views_of] for image, views_of in zip(images, pixels, strict=True)])))


def view_grid(views: np.ndarray, mean: Sequence[float], std: Sequence[float]) -> np.ndarray:
    """Returns views [V, B, h, w, C] as one uint8 RGB image with one row per image; floats are normalised pixels."""
    pixels = views if views.dtype == np.uint8 else denormalised(views, mean, std)
    return grid([list(views_of) for views_of in np.moveaxis(pixels, 1, 0)])


def denormalised(views: np.ndarray, mean: Sequence[float], std: Sequence[float]) -> np.ndarray:
    return np.clip((np.asarray(views) * np.asarray(std) + np.asarray(mean)) * 255 + 0.5, 0, 255).astype(np.uint8)


def grid(rows: list[list[np.ndarray]]) -> np.ndarray:
    """Returns uint8 images [h, w, C] of any size side by side on white, all enlarged to the side of the largest."""
    side = max(ZOOM_TO, *(image.shape[0] for row in rows for image in row))
    step = side + GAP
    canvas = np.full((len(rows) * step + GAP, max(map(len, rows)) * step + GAP, 3), 255, np.uint8)
    for y, row in enumerate(rows):
        for x, image in enumerate(row):
            tile = np.asarray(Image.fromarray(rgb(image)).resize((side, side), Image.Resampling.NEAREST))
            canvas[GAP + y * step : GAP + y * step + side, GAP + x * step : GAP + x * step + side] = tile
    return canvas


def rgb(image: np.ndarray) -> np.ndarray:
    """Returns a uint8 image [h, w, C] as RGB: 1 or 2 channels as grey, 4 as RGBA on white, the first 3 of more."""
    channels = image.shape[-1]
    if channels < 3:
        return np.repeat(image[..., :1], 3, axis=-1)
    if channels == 4:
        opacity = image[..., 3:] / 255
        return (image[..., :3] * opacity + 255 * (1 - opacity) + 0.5).astype(np.uint8)
    return image[..., :3]


def png(image: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, format="PNG", optimize=True)
    return buffer.getvalue()
