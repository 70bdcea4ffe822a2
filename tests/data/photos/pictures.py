"""Folders of small photographs for tests."""

import pathlib

import numpy as np
from PIL import Image


def write_photos(folder: pathlib.Path, count: int = 40, classes: int = 2, size: tuple[int, int] = (40, 56)) -> None:
    """Writes JPEG files of random colours, `count` in all, into one folder per class (0 classes: flat)."""
    rng = np.random.default_rng(0)
    for index in range(count):
        place = folder / f"class_{index % classes}" if classes else folder
        place.mkdir(parents=True, exist_ok=True)
        coarse = Image.fromarray(rng.integers(0, 256, (5, 7, 3), np.uint8))
        coarse.resize(size, Image.Resampling.BICUBIC).save(place / f"{index:03}.jpg")
