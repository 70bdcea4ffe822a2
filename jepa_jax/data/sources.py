"""Opens the data set that a config names, and parts of it."""

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from jepa_jax.base.classes import ClassTable, find_class
from jepa_jax.base.errors import UserError
from jepa_jax.config.augment import Crops
from jepa_jax.config.groups import DataConfig
from jepa_jax.data.contract import Bucketed, Cropping, Grouped, Source, element_names, fixed_order, known_labels
from jepa_jax.data.in_memory import open_arrays
from jepa_jax.data.readers.cifar import CLASSES, read_cifar10
from jepa_jax.data.readers.folder import FolderSource
from jepa_jax.data.readers.idx import read_idx
from jepa_jax.data.readers.npz import read_npz
from jepa_jax.data.readers.parquet import ParquetSource
from jepa_jax.data.readers.shards import ShardSource
from jepa_jax.data.readers.tfds import TfdsSource
from jepa_jax.data.synthetic import ShapesSource

OPENERS: dict[str, Callable[[DataConfig, str], Source]] = {
    "shapes": ShapesSource,
    "cifar10": functools.partial(open_arrays, read_cifar10, CLASSES),
    "idx": functools.partial(open_arrays, read_idx, ()),
    "folder": FolderSource,
    "shards": ShardSource,
    "parquet": ParquetSource,
    "npz": functools.partial(open_arrays, read_npz, ()),
    "tfds:<name>": TfdsSource,
}
SOURCES = ClassTable("SOURCES", dict.fromkeys(OPENERS, ""))  # with those of projects

OnSkipped = Callable[[Iterable[str]], None]  # called with the names of unreadable files


class Splits(NamedTuple):
    """A data set: what is trained on, what results are measured on, and what is held out of training to choose by."""

    train: Source
    test: Source
    validation: Source | None


def open_source(data: DataConfig, split: str) -> Source:
    """Opens one split of `data.source` and checks its files: "train", "test", or the "validation" part of train.

    Sources of projects and "package.module:Class" are called with the same arguments as those of OPENERS.
    """
    if split == "test":
        return _open_whole(data, split)
    train, validation = hold_out(_open_whole(data, "train"), data.validation)
    if split == "train":
        return train
    if validation is None:
        raise UserError("config.data.validation = 0: nothing is held out; set the share to hold out, for example 0.1")
    return validation


def open_splits(data: DataConfig) -> tuple[Source, Source]:
    """Opens the train split, without what is held out of it, and the test split."""
    return open_data(data)[:2]


def open_data(data: DataConfig) -> Splits:
    """Opens all splits and checks that they hold the same kind of elements."""
    whole, test = _open_whole(data, "train"), _open_whole(data, "test")
    if whole.spec != test.spec or len(test.classes) > len(whole.classes):
        raise UserError(
            f"config.data.source = {data.source}: the splits differ (train: {_described(whole)}; "
            f"test: {_described(test)}); give both the same arrays, labels to both or to none, and the test split no "
            "class that train lacks"
        )
    train, validation = hold_out(whole, data.validation)
    return Splits(train, test, validation)


def find_opener(data: DataConfig) -> Callable[[DataConfig, str], Source]:
    """Returns what opens `data.source`; raises UserError for a name that nobody knows."""
    name = "tfds:<name>" if data.source.startswith("tfds:") else data.source
    return OPENERS.get(name) or find_class("data.source", name, SOURCES)


def _open_whole(data: DataConfig, split: str) -> Source:
    opener = find_opener(data)
    try:
        return opener(data, split)
    except OSError as error:
        place = error.filename or f"config.data.dir = {data.dir}"
        raise UserError(f"{place}: cannot be read ({error.strerror or error}); check it and its permissions") from error
    except MemoryError as error:
        raise UserError(
            f"config.data.dir = {data.dir}: the {split} split does not fit into memory ({error}); use less of it, or "
            "data.source = folder, which reads batch by batch"
        ) from error


def hold_out(source: Source, share: float) -> tuple[Source, Source | None]:
    """Returns the part of a source that is trained on, and the one that is held out; None for a share of 0.

    Whole groups are held out, chosen by `fixed_order`; where a source has none, each element is one.
    """
    if not share:
        return source, None
    groups = source.groups if isinstance(source, Grouped) else np.arange(len(source))
    names = np.unique(groups)
    if len(names) < 2:
        raise UserError(
            f"config.data.validation = {share}: the train split is one group, which cannot be divided; add data, or "
            "set it to 0"
        )
    chosen = np.isin(groups, names[fixed_order(len(names))[: num_held_out(len(names), share)]])
    return subset(source, np.flatnonzero(~chosen)), subset(source, np.flatnonzero(chosen))


def num_held_out(count: int, share: float) -> int:
    """Returns how many of `count` groups a share is: at least one, unless the share is 0."""
    return max(1, round(count * share)) if share else 0


def _ignore(names: Iterable[str]) -> None:
    """Does nothing about unreadable files; unlike a lambda, it can be pickled."""


class Subset:
    """Some elements of a source; use `subset` to make one."""

    def __init__(self, source: Source, indices: np.ndarray, on_skipped: OnSkipped):
        self._source, self._indices, self._on_skipped = source, indices, on_skipped
        self.classes, self.spec = source.classes, source.spec
        self.caveat: str = getattr(source, "caveat", "")
        self.element_names = element_names(source)

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
        batch = self._source.batch(self._indices[indices])
        self._on_skipped(batch.get("skipped", ()))
        return batch


class BucketedSubset(Subset):
    """Some elements of a source that has buckets."""

    _source: Bucketed

    @functools.cached_property
    def buckets(self) -> np.ndarray:
        return self._source.buckets[self._indices]

    def in_bucket(self, bucket: int) -> Subset:
        return subset(self._source.in_bucket(bucket), self._indices, self._on_skipped)


class CroppingSubset(Subset):
    """Some photographs of a source."""

    _source: Cropping

    def cropped(self, crops: Mapping[str, Crops], seed: int, epoch: int) -> Subset:
        return subset(self._source.cropped(crops, seed, epoch), self._indices, self._on_skipped)


def subset(source: Source, indices: np.ndarray, on_skipped: OnSkipped = _ignore) -> Subset:
    """Returns some elements of a source, with its buckets if it has any, or as photographs that can be cropped."""
    kind = Subset
    if isinstance(source, Bucketed):
        kind = BucketedSubset
    elif isinstance(source, Cropping):
        kind = CroppingSubset
    return kind(source, np.asarray(indices), on_skipped)


def _described(source: Source) -> str:
    arrays = (f"{key} {one.dtype}{list(one.shape)}" for key, one in source.spec.items())
    return f"{', '.join(arrays)} of {len(source.classes)} classes"
