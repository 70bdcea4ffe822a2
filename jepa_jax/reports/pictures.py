"""The pictures that need no vocabulary: nearest neighbours, and maps of features made of the images themselves."""

import io
import math
from collections.abc import Mapping, Sequence

import numpy as np
import PIL.Image

from jepa_jax.data.pictures import grid, png
from jepa_jax.reports.page import embed_image
from jepa_jax.reports.parts import Image, PictureMaps

COLOURS = 10  # of templates/page.css; more classes get no colours
MAP_NOTE = (
    "Images at the first two principal components of their features: what lies together is alike to the encoder. "
    "Frames are classes or folders, where there are several. The pointer enlarges an image."
)
EDGE = 0.03  # of a map that stays free, so that no picture lies across its frame


def neighbour_rows(rows: Sequence[Sequence[np.ndarray]], alt: str) -> Image:
    """Returns rows of uint8 images [h, w, C]: the first one of a row, then those nearest to it."""
    return embed_image(png(grid([list(row) for row in rows])), alt, "picture")


def feature_maps(
    images: np.ndarray,  # uint8 [N, h, w, 3]
    coordinates: Mapping[str, np.ndarray],  # title -> [N, 2]
    labels: np.ndarray | None = None,  # [N], indices of classes
    classes: Sequence[str] = (),
) -> PictureMaps:
    """Returns one map for each title, with every image at its coordinates, framed in the colour of its class."""
    columns = math.ceil(math.sqrt(len(images)))
    rows = math.ceil(len(images) / columns)
    tiles = np.full((rows * columns, *images.shape[1:]), 255, np.uint8)
    tiles[: len(images)] = images
    height, width = images.shape[1:3]
    sheet = tiles.reshape(rows, columns, height, width, 3).swapaxes(1, 2).reshape(rows * height, columns * width, 3)
    content = io.BytesIO()
    PIL.Image.fromarray(sheet).save(content, "JPEG", quality=85)
    coloured = labels is not None and len(classes) <= COLOURS
    colours = [int(label) for label in labels] if coloured and labels is not None else [-1] * len(images)
    return PictureMaps(
        embed_image(content.getvalue(), "images").source,
        (columns, rows),
        {title: list(zip(*_percent(places), colours, strict=True)) for title, places in coordinates.items()},
        tuple(classes) if coloured else (),
    )


def _percent(places: np.ndarray) -> tuple[list[float], list[float]]:
    """Returns the distances of points [N, 2] from the left and the top of their map, in percent."""
    low, high = places.min(axis=0), places.max(axis=0)
    x, y = (EDGE + (1 - 2 * EDGE) * (places - low) / np.maximum(high - low, 1e-12)).T
    return [round(100 * float(value), 2) for value in x], [round(100 * (1 - float(value)), 2) for value in y]
