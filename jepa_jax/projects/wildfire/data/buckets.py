"""Buckets of histories by length: few static shapes, and memory that the longest sequence does not dictate."""

import functools

import numpy as np

from jepa_jax.base.errors import UserError
from jepa_jax.config.groups import DataConfig
from jepa_jax.data.contract import ElementNames
from jepa_jax.data.in_memory import Arrays
from jepa_jax.projects.wildfire.data.element import expected_specs, fire_spec, stacked


class FrameBuckets:
    """Base of sources of histories, which are padded to one of `data.frame_buckets` or to `data.max_frames`.

    A subclass gives `_element(index, frames)`, the element padded to `frames`, and `_lengths()`, int [N].
    """

    classes = ()
    element_names = ElementNames("sequences", "fires")
    expected_specs = staticmethod(expected_specs)

    def __init__(self, data: DataConfig):
        self._limits = (*data.frame_buckets, data.max_frames)
        if sorted(set(self._limits)) != list(self._limits):
            raise UserError(
                f"config.data.frame_buckets = {data.frame_buckets}: give ascending lengths below "
                f"data.max_frames = {data.max_frames}"
            )
        self._size, self._channels, self._frames = data.image_size, data.channels, data.max_frames
        self.spec = fire_spec(data.image_size, data.channels, data.max_frames)

    def __len__(self) -> int:
        raise NotImplementedError

    def batch(self, indices: np.ndarray) -> Arrays:
        return self.padded(indices, self._frames)

    def padded(self, indices: np.ndarray, frames: int) -> Arrays:
        """Returns a batch of histories padded to `frames`."""
        return stacked([self._element(int(index), frames) for index in indices])

    @functools.cached_property
    def buckets(self) -> np.ndarray:
        return np.searchsorted(self._limits, self._lengths())

    def in_bucket(self, bucket: int) -> "OneBucket":
        return OneBucket(self, self._size, self._channels, self._limits[bucket])

    def _element(self, index: int, frames: int) -> Arrays:
        raise NotImplementedError

    def _lengths(self) -> np.ndarray:
        raise NotImplementedError


class OneBucket:
    """The elements of a source, padded to the length of one bucket."""

    classes = ()

    def __init__(self, source: FrameBuckets, size: int, channels: int, frames: int):
        self._source, self._frames = source, frames
        self.spec = fire_spec(size, channels, frames)

    def __len__(self) -> int:
        return len(self._source)

    def batch(self, indices: np.ndarray) -> Arrays:
        return self._source.padded(indices, self._frames)
