"""Mean and standard deviation of each channel of a data set, computed once and kept beside it."""

import contextlib
import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jepa_jax.base.errors import UserError
from jepa_jax.base.files import read_json_or_empty, user_path, write_json
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
    place = user_path(data.dir, "config.data.dir")
    return place / "statistics.json" if place.is_dir() else place.with_name(f"{place.name}.statistics.json")


def channel_statistics(
    source: Source, count: int, on_image: Callable[[int, int], None] = lambda done, total: None
) -> Statistics:
    """Returns the statistics of a sample of the images of a source (0 = all), as they are delivered."""
    if "image" not in source.spec:
        raise UserError(
            f"config.data.statistics = set: the data holds {', '.join(source.spec)} and no image; use config"
        )
    chosen = sample(len(source), count)
    channels = source.spec["image"].shape[-1]
    total, squares, pixels = np.zeros(channels), np.zeros(channels), 0
    for first in range(0, len(chosen), CHUNK):
        images = source.batch(chosen[first : first + CHUNK])["image"].astype(np.float64) / 255
        flat = images.reshape(-1, channels)
        total += flat.sum(0)
        squares += np.square(flat).sum(0)
        pixels += len(flat)
        on_image(min(first + CHUNK, len(chosen)), len(chosen))
    mean = total / pixels
    std = np.sqrt(np.maximum(squares / pixels - np.square(mean), SMALLEST_STD**2))
    return Statistics(tuple(np.round(mean, DIGITS).tolist()), tuple(np.round(std, DIGITS).tolist()), len(chosen))


def open_set(data: DataConfig) -> Source:
    """Opens all train images of a set, whatever part of them a run uses, resized to `data.image_size` alone."""
    return open_source(dataclasses.replace(data, num_train=0, num_test=0, validation=0.0, shorter_side=0), "train")


def set_statistics(data: DataConfig) -> Statistics:
    """Returns the statistics that are kept beside a set; computes and keeps them if there are none of this set.

    A place that cannot be written is no error: the numbers are the same each time.
    """
    source, file = open_set(data), statistics_file(data)
    identity = set_identity(data, source)
    if found := kept_statistics(file, identity):
        return found
    computed = channel_statistics(source, IMAGES)
    with contextlib.suppress(OSError, UserError):
        keep_statistics(file, computed, identity)
    return computed


def set_identity(data: DataConfig, source: Source) -> dict[str, Any]:
    """Returns what statistics depend on, as it is kept with them: they are computed anew if any of it differs."""
    return {
        "source": data.source,
        "image_size": data.image_size,
        "channels": data.channels,
        "images": len(source),
    }


def keep_statistics(file: pathlib.Path, statistics: Statistics, identity: Mapping[str, Any]) -> None:
    write_json(file, dataclasses.asdict(statistics) | {"set": dict(identity)})


def kept_statistics(file: pathlib.Path, identity: Mapping[str, Any]) -> Statistics | None:
    """Returns the statistics of a file; None if it is not there, damaged, or about another set."""
    kept: dict[str, Any] = read_json_or_empty(file)
    try:
        mean, std = (tuple(float(number) for number in kept[name]) for name in ("mean", "std"))
        fits = kept["set"] == identity and len(mean) == len(std) == identity["channels"]
        return Statistics(mean, std, int(kept["images"])) if fits else None
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
