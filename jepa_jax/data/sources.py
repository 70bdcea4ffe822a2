"""Opens the data set that a config names."""

import functools
from collections.abc import Callable

from jepa_jax.base.classes import find_class
from jepa_jax.base.errors import UserError
from jepa_jax.config.groups import DataConfig
from jepa_jax.data.cifar import CLASSES, read_cifar10
from jepa_jax.data.contract import Source
from jepa_jax.data.fires.ndws import NdwsSource
from jepa_jax.data.fires.sequences import FireSequences
from jepa_jax.data.fires.wildfire import WildfireSource
from jepa_jax.data.folder import FolderSource
from jepa_jax.data.idx import read_idx
from jepa_jax.data.in_memory import open_arrays
from jepa_jax.data.npz import read_npz
from jepa_jax.data.synthetic import ShapesSource
from jepa_jax.data.tfds import TfdsSource

OPENERS: dict[str, Callable[[DataConfig, str], Source]] = {
    "shapes": ShapesSource,
    "cifar10": functools.partial(open_arrays, read_cifar10, CLASSES),
    "idx": functools.partial(open_arrays, read_idx, ()),
    "folder": FolderSource,
    "npz": functools.partial(open_arrays, read_npz, ()),
    "tfds:<name>": TfdsSource,
    "wildfire": WildfireSource,
    "fire_sequences": FireSequences,
    "ndws": NdwsSource,
}


def open_source(data: DataConfig, split: str) -> Source:
    """Opens one split, "train" or "test", of `data.source` and checks its files.

    Besides the names of OPENERS, "package.module:Class" is called with the same arguments.
    """
    name = "tfds:<name>" if data.source.startswith("tfds:") else data.source
    opener = OPENERS.get(name) or find_class("data.source", name, dict.fromkeys(OPENERS, ""))
    return opener(data, split)


def open_splits(data: DataConfig) -> tuple[Source, Source]:
    """Opens the train and the test split and checks that they hold the same kind of elements."""
    train, test = open_source(data, "train"), open_source(data, "test")
    if train.spec != test.spec or len(test.classes) > len(train.classes):
        raise UserError(
            f"config.data.source = {data.source}: the splits differ (train: {_described(train)}; "
            f"test: {_described(test)}); give both the same arrays, labels to both or to none, and the test split no "
            "class that train lacks"
        )
    return train, test


def _described(source: Source) -> str:
    arrays = (f"{key} {one.dtype}{list(one.shape)}" for key, one in source.spec.items())
    return f"{', '.join(arrays)} of {len(source.classes)} classes"
