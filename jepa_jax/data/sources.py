"""Opens the data set that a config names, and parts of it."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jepa_jax.base.classes import ClassTable, find_class
from jepa_jax.base.errors import UserError
from jepa_jax.config.augment import Crops
from jepa_jax.config.groups import DataConfig
from jepa_jax.data.contract import (
    Bucketed,
    Cropping,
    Grouped,
    Source,
    Spec,
    element_names,
    fixed_order,
    known_labels,
    sample,
    target_names,
)  # fmt: skip
from jepa_jax.data.elements import StreamSource, as_source
from jepa_jax.data.in_memory import check_image, num_used, open_arrays
from jepa_jax.data.readers.cifar import CLASSES, read_cifar10
from jepa_jax.data.readers.folder import FolderSource
from jepa_jax.data.readers.idx import read_idx
from jepa_jax.data.readers.npz import read_npz
from jepa_jax.data.readers.parquet import ParquetSource
from jepa_jax.data.readers.shards import ShardSource
from jepa_jax.data.readers.tfds import TfdsSource
from jepa_jax.data.readers.webdataset import open_webdataset
from jepa_jax.data.reading import Read
from jepa_jax.data.synthetic import ShapesSource


def _from_python(data: DataConfig, split: str) -> Source:
    raise UserError("config.data.source = python: this data was given to jepa_jax.train as data=...; give it again")


OPENERS: dict[str, Callable[[DataConfig, str], Source]] = {
    "shapes": ShapesSource,
    "cifar10": functools.partial(open_arrays, read_cifar10, CLASSES),
    "idx": functools.partial(open_arrays, read_idx, ()),
    "folder": FolderSource,
    "shards": ShardSource,
    "parquet": ParquetSource,
    "npz": functools.partial(open_arrays, read_npz, ()),
    "tfds:<name>": TfdsSource,
    "webdataset": open_webdataset,
    "python": _from_python,
}
SOURCES = ClassTable("SOURCES", dict.fromkeys(OPENERS, ""))  # with those of projects

Reader = Callable[[Read], dict[str, Any]]  # returns what a function that reads a batch returns


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


def open_data(data: DataConfig, given: Mapping[str, Any] | None = None) -> Splits:
    """Opens all splits and checks that they hold the same kind of elements.

    Args:
      given: data sets by split, for `data.source = python`.
    """
    whole, test = (_open_whole(data, split, given) for split in ("train", "test"))
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


def _open_whole(data: DataConfig, split: str, given: Mapping[str, Any] | None = None) -> Source:
    """Opens a split, as many elements of it as are asked for, with its transforms, and checks its images."""
    if given is not None and split not in given:
        raise UserError(f"data: holds {', '.join(given)} and no {split!r}; give both 'train' and 'test'")
    opener = find_opener(data)
    try:
        opened = opener(data, split) if given is None else given[split]
        source = as_source(opened, split=split, count=data.num_train if split == "train" else data.num_test)
        count = num_used(data, split, len(source))
        if count < len(source):
            source = subset(source, sample(len(source), count))
        if data.transforms:
            source = transformed(source, Transforms(data.transforms))
        if "image" in source.spec and not isinstance(opened, Source):
            check_image(source.spec["image"], data)
        return source
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
    if isinstance(source, StreamSource):
        raise UserError(f"config.data.validation = {share}: a stream cannot be divided; set it to 0")
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


def read_directly(read: Read) -> dict[str, Any]:
    """Returns what `read` returns."""
    return read()


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
    """Some elements of a source that has buckets."""

    _source: Bucketed

    @functools.cached_property
    def buckets(self) -> np.ndarray:
        return self._source.buckets[self._indices]

    def in_bucket(self, bucket: int) -> Subset:
        return self._of(self._source.in_bucket(bucket))


class CroppingSubset(Subset):
    """Some photographs of a source."""

    _source: Cropping

    def cropped(self, crops: Mapping[str, Crops], seed: int, epoch: int) -> Subset:
        return self._of(self._source.cropped(crops, seed, epoch))


def subset(
    source: Source, indices: np.ndarray, reader: Reader = read_directly, transform: Transforms | None = None
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
    """Returns all elements of a source, transformed."""
    if isinstance(source, StreamSource):
        return source.changed(functools.partial(transformed, transform=transform))
    return subset(source, np.arange(len(source)), transform=transform)


def _described(source: Source) -> str:
    arrays = (f"{key} {one.dtype}{list(one.shape)}" for key, one in source.spec.items())
    return f"{', '.join(arrays)} of {len(source.classes)} classes"
