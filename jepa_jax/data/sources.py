"""Opens the data set that a config names."""

import functools
import importlib
from collections.abc import Callable
from typing import Any

from jepa_jax.base.errors import UserError
from jepa_jax.data.cifar import CLASSES, read_cifar10
from jepa_jax.data.contract import Source, channels_of
from jepa_jax.data.folder import FolderSource
from jepa_jax.data.idx import read_idx
from jepa_jax.data.in_memory import Arrays, InMemorySource, Limit, check_image_size, with_channels
from jepa_jax.data.npz import read_npz
from jepa_jax.data.synthetic import open_shapes
from jepa_jax.data.tfds import TfdsSource

SOURCES = ("shapes", "cifar10", "idx", "folder", "npz", "tfds:<name>", "<package.module>:<function>")


def open_source(data: Any, split: str) -> Source:
    """Opens one split of `data.source` and checks its files.

    Besides the names of SOURCES, "package.module:function" calls a function of the user's own with the same arguments.

    Args:
      data: the config group `data`.
      split: "train" or "test".
    """
    name, limit = data.source, Limit(f"data.num_{split}", getattr(data, f"num_{split}"))
    if name == "shapes":
        return open_shapes(data, split, limit)
    if name == "cifar10":
        return _open_arrays(data, limit, functools.partial(read_cifar10, data.dir, split), CLASSES)
    if name == "idx":
        return _open_arrays(data, limit, functools.partial(read_idx, data.dir, split, data.image_size))
    if name == "npz":
        return _open_arrays(data, limit, functools.partial(read_npz, data.dir, split))
    if name == "folder":
        return FolderSource(data, split, limit)
    kind, _, rest = name.partition(":")
    if not rest:
        raise UserError(f"data.source = {name}: unknown; use one of {', '.join(SOURCES)}")
    return TfdsSource(rest, data, split, limit) if kind == "tfds" else _open_custom(data, split)


def open_splits(data: Any) -> tuple[Source, Source]:
    """Opens the train and the test split and checks that they hold the same kind of elements."""
    train, test = open_source(data, "train"), open_source(data, "test")
    if train.spec != test.spec or len(test.classes) > len(train.classes):
        raise UserError(
            f"data.source = {data.source}: the splits differ (train: {_described(train)}; test: {_described(test)}); "
            "give both the same arrays, labels to both or to none, and the test split no class that train lacks"
        )
    return train, test


def _described(source: Source) -> str:
    arrays = (f"{key} {one.dtype}{list(one.shape)}" for key, one in source.spec.items())
    return f"{', '.join(arrays)} of {len(source.classes)} classes"


def _open_arrays(data: Any, limit: Limit, read: Callable[[], Arrays], classes: tuple[str, ...] = ()) -> Source:
    load = functools.partial(_load_first, read, limit, channels_of(data), data.source)
    source = InMemorySource(load, classes)
    height, width, _ = source.spec["image"].shape
    check_image_size(height, width, data.image_size, data.source)
    return source


def _load_first(read: Callable[[], Arrays], limit: Limit, channels: int, what: str) -> Arrays:
    arrays = read()
    count = limit.of(len(arrays["image"]))
    first = {key: array[:count] for key, array in arrays.items()}
    return first | {"image": with_channels(first["image"], channels, what)}


def _open_custom(data: Any, split: str) -> Source:
    module, _, function = data.source.partition(":")
    try:
        opener = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise UserError(
            f"data.source = {data.source}: cannot be imported ({error}); use one of {', '.join(SOURCES)}, "
            "with the module on PYTHONPATH"
        ) from error
    return opener(data, split)
