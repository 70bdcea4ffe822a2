"""Opens the data set that a config names, and parts of it."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import grain
import jax
import numpy as np
from ml_collections import ConfigDict

from jepa_jax.base.classes import ClassTable, find_class
from jepa_jax.base.errors import UserError
from jepa_jax.config.groups import Config, DataConfig
from jepa_jax.config.resolve import resolve
from jepa_jax.data.batches import batch_dataset
from jepa_jax.data.contract import Grouped, OwnValidation, Source, fixed_order, sample
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
from jepa_jax.data.subset import Transforms, subset, transformed
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


class Splits(NamedTuple):
    """A data set: what is trained on, what results are measured on, and what is held out of training to choose by."""

    train: Source
    test: Source
    validation: Source | None


def dataset(config: Config | ConfigDict | Mapping[str, Any], split: str = "train") -> Any:
    """See `jepa_jax.dataset`; of a stream it is a grain.IterDataset."""
    config = config if isinstance(config, Config) else resolve(config)
    return batch_dataset(
        open_source(config.data, split),
        config.data.batch_size,
        seed=config.train.seed,
        crops=config.loader_crops,
        process_index=jax.process_index(),
        process_count=jax.process_count(),
    )


def open_source(data: DataConfig, split: str) -> Source:
    """Opens one split of `data.source` and checks its files: "train", "test", or the "validation" part of train.

    Sources of projects and "package.module:Class" are called with the same arguments as those of OPENERS.
    """
    if split == "test":
        return _open_whole(data, split)
    train, validation = _divided(_open_whole(data, "train"), data)
    if split == "train":
        return train
    if validation is None:
        raise UserError("config.data.validation = 0: nothing is held out; set the share to hold out, for example 0.1")
    return validation


def open_splits(data: DataConfig) -> tuple[Source, Source]:
    """Opens the train split, without what is held out of it, and the test split."""
    return open_data(data)[:2]


def open_data(data: DataConfig, given: Mapping[str, Any] | None = None) -> Splits:
    """Opens all splits and checks that they hold the same kind of elements."""
    whole, test = (_open_whole(data, split, given) for split in ("train", "test"))
    if whole.spec != test.spec or len(test.classes) > len(whole.classes):
        raise UserError(
            f"config.data.source = {data.source}: the splits differ (train: {_described(whole)}; "
            f"test: {_described(test)}); give both the same arrays, labels to both or to none, and the test split no "
            "class that train lacks"
        )
    train, validation = _divided(whole, data)
    return Splits(train, test, validation)


def find_opener(data: DataConfig) -> Callable[[DataConfig, str], Source]:
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
        if isinstance(opened, grain.IterDataset) and isinstance(source, StreamSource) and split == "train":
            source = source.shuffled(data.shuffle_window, data.seed)
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


def _divided(whole: Source, data: DataConfig) -> tuple[Source, Source | None]:
    """Returns what is trained on and what is held out: the validation split of the data set, if it has one."""
    if data.validation and isinstance(find_opener(data), OwnValidation):
        return whole, _open_whole(data, "validation")
    return hold_out(whole, data.validation)


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


def _described(source: Source) -> str:
    arrays = (f"{key} {one.dtype}{list(one.shape)}" for key, one in source.spec.items())
    return f"{', '.join(arrays)} of {len(source.classes)} classes"
