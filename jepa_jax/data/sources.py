"""Where samples are: `open_source(config.data, split)` gives any data set as whole uint8 batches by index."""

import functools
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from jepa_jax.base.errors import UserError
from jepa_jax.data import cifar, folder, idx, npz, synthetic, tfds
from jepa_jax.data.in_memory import Arrays, InMemorySource, require_count, require_size


class Source(Protocol):
    """A split of a data set; picklable, and cheap to pickle: worker processes open the files themselves."""

    classes: tuple[str, ...]
    image_shape: tuple[int, int, int]  # H, W, 3 of every image; grey is repeated

    def __len__(self) -> int: ...

    def batch(self, indices: np.ndarray) -> dict[str, Any]:
        """{"image": uint8 [B, H, W, 3], "label": int32 [B]}, and "skipped": paths of unreadable images, if any."""
        ...


def open_source(data_config: Any, split: str) -> Source:
    """Opens `data.source` and checks its files; split is "train" or "test"."""
    if split not in ("train", "test"):
        raise ValueError(f"split {split!r} is neither 'train' nor 'test'")
    name = data_config.source
    if data_config.image_size < 1:
        raise UserError(f"data.image_size = {data_config.image_size}: must be at least 1 pixel")
    if name in OPENERS:
        return OPENERS[name](data_config, split)
    if name.startswith("tfds:") and name != "tfds:":
        return _open_tfds(data_config, split)
    raise UserError(f"data.source = {name}: unknown; use one of {', '.join((*OPENERS, 'tfds:<name>'))}")


def sample_limit(data_config: Any, split: str) -> tuple[str, int]:
    """The key that limits this split and its value; 0 = all."""
    key = f"num_{split}"
    count = getattr(data_config, key)
    if count < 0:
        raise UserError(f"data.{key} = {count}: must not be negative; use 0 for all images")
    return f"data.{key}", count


def _open_shapes(data_config: Any, split: str) -> Source:
    key, count = sample_limit(data_config, split)
    if count == 0:
        raise UserError(f"{key} = 0: shapes are drawn on demand; say how many, for example {key} = 4096")
    if data_config.image_size < 8:
        raise UserError(f"data.image_size = {data_config.image_size}: shapes need at least 8 pixels")
    return synthetic.open_shapes(count, size=data_config.image_size, seed=data_config.seed, split=split)


def _open_cifar10(data_config: Any, split: str) -> Source:
    read = functools.partial(cifar.read_cifar10, data_config.dir, split)
    return _open_arrays(data_config, split, read, cifar.CLASSES)


def _open_idx(data_config: Any, split: str) -> Source:
    return _open_arrays(
        data_config, split, functools.partial(idx.read_idx, data_config.dir, split, data_config.image_size)
    )


def _open_npz(data_config: Any, split: str) -> Source:
    return _open_arrays(data_config, split, functools.partial(npz.read_npz, data_config.dir, split))


def _open_arrays(data_config: Any, split: str, read: Callable[[], Arrays], classes: tuple[str, ...] = ()) -> Source:
    key, count = sample_limit(data_config, split)
    source = InMemorySource(functools.partial(_read_first, read, count, key), classes)
    require_size(source.image_shape, data_config.image_size, data_config.source)
    return source


def _read_first(read: Callable[[], Arrays], count: int, key: str) -> Arrays:
    images, labels = read()
    require_count(count, len(images), key)
    return images[: count or None], labels[: count or None]


def _open_folder(data_config: Any, split: str) -> Source:
    key, count = sample_limit(data_config, split)
    size, on_error = data_config.image_size, data_config.on_error
    return folder.FolderSource(data_config.dir, split, image_size=size, on_error=on_error, limit=count, limit_key=key)


def _open_tfds(data_config: Any, split: str) -> Source:
    key, count = sample_limit(data_config, split)
    name = data_config.source.removeprefix("tfds:")
    size = data_config.image_size
    return tfds.TfdsSource(name, data_config.dir, split, image_size=size, limit=count, limit_key=key)


OPENERS = {
    "shapes": _open_shapes,
    "cifar10": _open_cifar10,
    "idx": _open_idx,
    "folder": _open_folder,
    "npz": _open_npz,
}
