"""Mean and standard deviation of each channel of a data set, computed once and kept beside it."""

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np

from jepa_jax.base.errors import UserError
from jepa_jax.base.files import read_json_or_empty, write_json
from jepa_jax.config.groups import DataConfig
from jepa_jax.data.contract import Source, sample
from jepa_jax.data.sources import open_source

IMAGES = 1000  # that statistics are computed of, drawn by `sample`
CHUNK = 50
DIGITS = 4
SMALLEST_STD = 1e-4  # of a channel that is constant


@dataclasses.dataclass(frozen=True)
class Statistics:
    """Mean and standard deviation of each channel in 0..1, and of how many images."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    images: int


def statistics_file(data: DataConfig) -> pathlib.Path:
    """Returns where the statistics of a set are kept: in its folder, or beside its file."""
    place = pathlib.Path(data.dir).expanduser()
    return place / "statistics.json" if place.is_dir() else place.with_name(f"{place.name}.statistics.json")


def channel_statistics(
    source: Source, count: int, on_image: Callable[[int, int], None] = lambda done, total: None
) -> Statistics:
    """Returns the statistics of a sample of the images of a source (0 = all), as they are delivered."""
    chosen = sample(len(source), count)
    total, squares, pixels = np.zeros(0), np.zeros(0), 0
    for first in range(0, len(chosen), CHUNK):
        images = source.batch(chosen[first : first + CHUNK])["image"].astype(np.float64) / 255
        flat = images.reshape(-1, images.shape[-1])
        total = flat.sum(0) + (total if total.size else 0)
        squares = np.square(flat).sum(0) + (squares if squares.size else 0)
        pixels += len(flat)
        on_image(min(first + CHUNK, len(chosen)), len(chosen))
    mean = total / pixels
    std = np.sqrt(np.maximum(squares / pixels - np.square(mean), SMALLEST_STD**2))
    return Statistics(tuple(np.round(mean, DIGITS).tolist()), tuple(np.round(std, DIGITS).tolist()), len(chosen))


def set_statistics(
    data: DataConfig, count: int = IMAGES, on_image: Callable[[int, int], None] = lambda done, total: None
) -> Statistics:
    """Returns the statistics that are kept beside a set; computes and keeps them if there are none for its channels.

    A place that cannot be written is no error: the numbers are the same each time.
    """
    file = statistics_file(data)
    if found := kept_statistics(file, data.channels):
        return found
    computed = channel_statistics(open_source(data, "train"), count, on_image)
    try:
        write_json(file, dataclasses.asdict(computed))
    except (OSError, UserError):
        pass
    return computed


def kept_statistics(file: pathlib.Path, channels: int) -> Statistics | None:
    """Returns the statistics of a file; None if it is not there, damaged, or about other channels."""
    kept: dict[str, Any] = read_json_or_empty(file)
    try:
        mean, std = (tuple(float(number) for number in kept[name]) for name in ("mean", "std"))
        return Statistics(mean, std, int(kept["images"])) if len(mean) == len(std) == channels else None
    except (KeyError, TypeError, ValueError):
        return None
