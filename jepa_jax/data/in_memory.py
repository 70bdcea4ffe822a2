"""Data sets that fit in memory: loaded once and read by fancy indexing."""

import functools
import os
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jepa_jax.base.errors import UserError
from jepa_jax.config.groups import DataConfig
from jepa_jax.data.contract import sample
from jepa_jax.data.readers.bounded import check_classes

LEAST_CLASSES = 10

Arrays = dict[str, np.ndarray]  # [N, ...] each, e.g. {"image": uint8 [N, H, W, C], "label": int32 [N]}


def numbered_classes(highest: int) -> tuple[str, ...]:
    """Returns names for classes up to a number; ten at least, so that a test split may lack the last one."""
    check_classes(highest, "data: 'label'")
    return tuple(map(str, range(max(LEAST_CLASSES, int(highest) + 1))))


class InMemorySource:
    """Serves the arrays that `load` returns; each worker process calls `load` itself instead of receiving them."""

    def __init__(self, load: Callable[[], Arrays], classes: tuple[str, ...] = ()):
        self._load = load
        self._arrays: Arrays | None = None
        arrays = self._open()
        self._length = len(next(iter(arrays.values())))
        self.spec = {key: jax.ShapeDtypeStruct(array.shape[1:], array.dtype) for key, array in arrays.items()}
        self.classes = classes
        if "label" in arrays and not classes:
            self.classes = numbered_classes(arrays["label"].max())

    def __len__(self) -> int:
        return self._length

    @property
    def labels(self) -> np.ndarray | None:
        return self._open().get("label")

    def batch(self, indices: np.ndarray) -> Arrays:
        return {key: array[indices] for key, array in self._open().items()}

    def _open(self) -> Arrays:
        if self._arrays is None:
            self._arrays = self._load()
        return self._arrays

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_arrays": None}


class SharedArrays:
    """Returns arrays; worker processes get them in memory that all of them share, instead of a copy each."""

    def __init__(self, arrays: Arrays):
        self._arrays = arrays

    def __call__(self) -> Arrays:
        return self._arrays

    @functools.cached_property
    def _file(self) -> int:
        """A file without a name that holds the arrays, one after the other."""
        descriptor = os.memfd_create("jepa_jax-data", os.MFD_CLOEXEC)
        with open(descriptor, "wb", closefd=False) as file:
            for array in self._arrays.values():
                file.write(np.ascontiguousarray(array).data)
        return descriptor

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if "_file" in self.__dict__:
            close(self._file)

    def __reduce__(self) -> tuple[Any, ...]:
        if not hasattr(os, "memfd_create"):
            return SharedArrays, (self._arrays,)
        table = {name: (array.shape, array.dtype) for name, array in self._arrays.items()}
        return _mapped, (f"/proc/{os.getpid()}/fd/{self._file}", table)


def _mapped(file: str, table: dict[str, tuple[tuple[int, ...], np.dtype]]) -> SharedArrays:
    """Returns arrays of a file, which the process that pickled them keeps open."""
    arrays, offset = {}, 0
    for name, (shape, dtype) in table.items():
        arrays[name] = np.memmap(file, dtype, "r", offset, shape) if 0 not in shape else np.empty(shape, dtype)
        offset += arrays[name].nbytes
    return SharedArrays(arrays)


def open_arrays(
    read: Callable[[DataConfig, str], Arrays], classes: tuple[str, ...], data: DataConfig, split: str
) -> InMemorySource:
    """Opens one split of images that `read` returns in full; classes without names are numbered."""
    source = InMemorySource(functools.partial(_load, read, data, split), classes)
    check_image(source.spec["image"], data)
    return source


def _load(read: Callable[[DataConfig, str], Arrays], data: DataConfig, split: str) -> Arrays:
    arrays = read(data, split)
    count = num_used(data, split, len(arrays["image"]))
    if count < len(arrays["image"]):
        chosen = sample(len(arrays["image"]), count)
        arrays = {key: array[chosen] for key, array in arrays.items()}
    if (arrays["image"].shape[-1], data.channels) == (1, 3):  # nothing else is converted
        arrays = arrays | {"image": np.repeat(arrays["image"], 3, axis=-1)}
    return arrays


def num_used(data: DataConfig, split: str, available: int) -> int:
    """Returns how many of the available samples of a split the config uses."""
    count = data.num_train if split == "train" else data.num_test
    if count > available:
        raise UserError(
            f"config.data.num_{split} = {count}: the data has {available} images; use at most that, or 0 for all"
        )
    return count or available


def check_image(image: jax.ShapeDtypeStruct, data: DataConfig) -> None:
    if len(image.shape) != 3:
        raise UserError(f"data: 'image' has shape {list(image.shape)}; images are [height, width, channels]")
    height, width, channels = image.shape
    check_image_size(height, width, data)
    if channels != data.channels:
        raise UserError(
            f"config.data.channels = {data.channels}: {data.source} has images of {channels} channels; set "
            f"data.channels = {channels}"
        )


def check_image_size(height: int, width: int, data: DataConfig) -> None:
    """Raises UserError unless stored images have the configured size: they are never resized silently."""
    size = data.image_size
    if (height, width) != (size, size):
        fix = f"set data.image_size = {height}" if height == width else "resize the images to a square, channels last"
        raise UserError(
            f"config.data.image_size = {size}: {data.source} has images of {height} x {width} pixels; {fix}"
        )
