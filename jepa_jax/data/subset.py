"""Parts of sources, perhaps transformed."""

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jepa_jax.base.classes import find_class
from jepa_jax.config.augment import Crops
from jepa_jax.data.contract import (
    Bucketed,
    Cropping,
    Grouped,
    Source,
    Spec,
    element_names,
    known_labels,
    target_names,
)  # fmt: skip
from jepa_jax.data.elements import StreamSource
from jepa_jax.data.reading import Read

Reader = Callable[[Read], dict[str, Any]]  # returns what a function that reads a batch returns


class Transforms:
    """Functions of batches by name, "package.module:function", that are called one after the other."""

    def __init__(self, names: Sequence[str]):
        self._functions = [find_class("data.transforms", name, {}) for name in names]

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        skipped = {name: batch[name] for name in ("skipped",) if name in batch}
        batch = {name: array for name, array in batch.items() if name not in skipped}
        for function in self._functions:
            batch = function(batch)
        return batch | skipped

    def spec(self, spec: Spec) -> Spec:
        """Returns the spec of transformed elements, as two elements of zeros show it."""
        zeros = {name: np.zeros((2, *one.shape), one.dtype) for name, one in spec.items()}
        return {name: jax.ShapeDtypeStruct(array.shape[1:], array.dtype) for name, array in self(zeros).items()}


class Subset:
    """Some elements of a source, perhaps transformed; use `subset` to make one."""

    def __init__(self, source: Source, indices: np.ndarray, reader: Reader, transform: Transforms | None):
        self._source, self._indices, self._reader, self._transform = source, indices, reader, transform
        self.classes, self.spec = source.classes, transform.spec(source.spec) if transform else source.spec
        self.caveat: str = getattr(source, "caveat", "")
        self.divided: bool = getattr(source, "divided", False)
        self.element_names = element_names(source)
        self.targets = target_names(source)

    def __len__(self) -> int:
        return len(self._indices)

    @property
    def groups(self) -> np.ndarray:
        """Groups of the source; where it has none, each element is one."""
        return self._source.groups[self._indices] if isinstance(self._source, Grouped) else self._indices

    @property
    def labels(self) -> np.ndarray | None:
        """Labels, where the source knows them without reading its elements."""
        labels = known_labels(self._source)
        return None if labels is None else labels[self._indices]

    def batch(self, indices: np.ndarray) -> dict[str, Any]:
        batch = self._reader(lambda: self._source.batch(self._indices[indices]))
        return self._transform(batch) if self._transform else batch

    def _of(self, source: Source) -> "Subset":
        return subset(source, self._indices, self._reader, self._transform)


class BucketedSubset(Subset):
    _source: Bucketed

    @functools.cached_property
    def buckets(self) -> np.ndarray:
        return self._source.buckets[self._indices]

    def in_bucket(self, bucket: int) -> Subset:
        return self._of(self._source.in_bucket(bucket))


class CroppingSubset(Subset):
    _source: Cropping

    def cropped(self, crops: Mapping[str, Crops], seed: int, epoch: int) -> Subset:
        return self._of(self._source.cropped(crops, seed, epoch))


def subset(
    source: Source, indices: np.ndarray, reader: Reader = operator.call, transform: Transforms | None = None
) -> Subset:
    """Returns some elements of a source, with its buckets if it has any, or as photographs that can be cropped.

    Every batch is read by `reader`.
    """
    kind = Subset
    if isinstance(source, Bucketed):
        kind = BucketedSubset
    elif isinstance(source, Cropping):
        kind = CroppingSubset
    return kind(source, np.asarray(indices), reader, transform)


def transformed(source: Source, transform: Transforms) -> Source:
    if isinstance(source, StreamSource):
        return source.changed(functools.partial(transformed, transform=transform))
    return subset(source, np.arange(len(source)), transform=transform)
