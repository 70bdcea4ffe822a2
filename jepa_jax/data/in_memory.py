"""A source whose images fit in memory: loaded once, read by fancy indexing."""

from collections.abc import Callable
from typing import Any

import numpy as np

from jepa_jax.base.errors import UserError

Arrays = tuple[np.ndarray, np.ndarray]  # images uint8 [N, H, W, 3], labels int32 [N]


class InMemorySource:
    """Images and labels from `load()`, which is called again in each worker process instead of shipping the arrays."""

    def __init__(self, load: Callable[[], Arrays], classes: tuple[str, ...] = ()):
        self._load = load
        self._arrays: Arrays | None = None
        images, labels = self._open()
        # A set without names: numbers, at least ten, so that a test split without the last class has as many as train.
        self.classes = classes or tuple(str(i) for i in range(max(10, int(labels.max()) + 1)))
        self._length = len(images)
        self.image_shape = images.shape[1:]

    def __len__(self) -> int:
        return self._length

    def batch(self, indices: np.ndarray) -> dict[str, Any]:
        images, labels = self._open()
        return {"image": images[indices], "label": labels[indices]}

    def _open(self) -> Arrays:
        if self._arrays is None:
            self._arrays = self._load()
        return self._arrays

    def __getstate__(self):
        return {**self.__dict__, "_arrays": None}


def require_count(count: int, available: int, key: str) -> None:
    """`count` = 0 asks for everything there is."""
    if count > available:
        raise UserError(f"{key} = {count}: the data has {available} images; use at most that, or 0 for all of them")


def require_size(actual: tuple[int, ...], image_size: int, what: str) -> None:
    """Data of a fixed size is never resized silently."""
    if tuple(actual[:2]) != (image_size, image_size):
        height, width = actual[:2]
        fix = f"set data.image_size = {height}" if height == width else "resize the images to a square"
        raise UserError(f"data.image_size = {image_size}: {what} has images of {height} x {width} pixels; {fix}")
