"""Data sets that fit in memory: loaded once and read by fancy indexing."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jepa_jax.base.errors import UserError

Arrays = dict[str, np.ndarray]  # [N, ...] each, e.g. {"image": uint8 [N, H, W, C], "label": int32 [N]}


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
            # At least ten, so that a test split in which the last class is missing has as many classes as train.
            self.classes = tuple(str(i) for i in range(max(10, int(arrays["label"].max()) + 1)))

    def __len__(self) -> int:
        return self._length

    def batch(self, indices: np.ndarray) -> Arrays:
        return {key: array[indices] for key, array in self._open().items()}

    def _open(self) -> Arrays:
        if self._arrays is None:
            self._arrays = self._load()
        return self._arrays

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_arrays": None}


@dataclasses.dataclass(frozen=True)
class Limit:
    """How many samples of a split to use, and the config key that says so; 0 means all."""

    key: str
    count: int = 0

    def of(self, available: int) -> int:
        """Returns the number of samples to use of those available.

        Raises:
          UserError: more are asked for than there are.
        """
        if self.count > available:
            raise UserError(
                f"{self.key} = {self.count}: the data has {available} images; use at most that, or 0 for all"
            )
        return self.count or available


def check_image_size(height: int, width: int, image_size: int, what: str) -> None:
    """Raises UserError unless stored images have the configured size: they are never resized silently."""
    if (height, width) != (image_size, image_size):
        fix = f"set data.image_size = {height}" if height == width else "resize the images to a square"
        raise UserError(f"data.image_size = {image_size}: {what} has images of {height} x {width} pixels; {fix}")


def with_channels(images: np.ndarray, channels: int, what: str) -> np.ndarray:
    """Returns images [N, H, W, C] with `channels` channels: grey is repeated to RGB, no other conversion is made."""
    stored = images.shape[-1]
    if stored == 1 and channels == 3:
        return np.repeat(images, 3, axis=-1)
    if stored != channels:
        raise UserError(
            f"data.channels = {channels}: {what} has images of {stored} channels; set data.channels = {stored}"
        )
    return images
