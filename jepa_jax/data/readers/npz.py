"""Images and labels in numpy's .npz: train.npz and test.npz in a folder, or one file with both splits."""

import pathlib
import zipfile
import zlib
from collections.abc import Mapping

import numpy as np

from jepa_jax.base.errors import UserError
from jepa_jax.config.groups import DataConfig
from jepa_jax.data.in_memory import Arrays

ONE_SPLIT = {"image": ("image", "images", "x"), "label": ("label", "labels", "y")}
BOTH_SPLITS = {"image": ("x_{}", "{}_images"), "label": ("y_{}", "{}_labels")}


def read_npz(data: DataConfig, split: str) -> Arrays:
    """Reads images uint8 [N, H, W, C] (C = 1 for stored [N, H, W]) and labels int32 [N] of one split.

    A file that holds images alone is unlabelled. A file with any other array must have labels for the split, so that
    labels under an unexpected name are not dropped silently.

    `data.dir` is a folder with train.npz and test.npz, whose arrays are named as in ONE_SPLIT, or one file with the
    names of BOTH_SPLITS.
    """
    place = pathlib.Path(data.dir).expanduser()
    if not data.dir or not place.exists():
        raise UserError(
            f"config.data.dir = {data.dir!r}: no such file or folder; npz needs a .npz file or a folder with train.npz "
            "and test.npz"
        )
    file = place / f"{split}.npz" if place.is_dir() else place
    names = ONE_SPLIT if place.is_dir() else {k: tuple(n.format(split) for n in v) for k, v in BOTH_SPLITS.items()}
    if not file.exists():
        raise UserError(f"{file}: missing; a folder of npz data holds train.npz and test.npz")
    try:
        with np.load(file, allow_pickle=False) as content:
            images = _checked_images(_pick(content, names["image"], file), file)
            if _holds_images_alone(content):
                return {"image": images}
            return {"image": images, "label": _checked_labels(_pick(content, names["label"], file), len(images), file)}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(f"{file}: not a readable .npz file ({error}); write it with numpy.savez") from error


def _holds_images_alone(content: Mapping[str, np.ndarray]) -> bool:
    both = {name.format(split) for name in BOTH_SPLITS["image"] for split in ("train", "test")}
    return set(content) <= both | set(ONE_SPLIT["image"])


def _pick(content: Mapping[str, np.ndarray], names: tuple[str, ...], file: pathlib.Path) -> np.ndarray:
    for name in names:
        if name in content:
            return content[name]
    raise UserError(f"{file}: holds {', '.join(content) or 'nothing'}; expected an array named {' or '.join(names)}")


def _checked_images(images: np.ndarray, file: pathlib.Path) -> np.ndarray:
    if images.dtype != np.uint8:
        raise UserError(
            f"{file}: images are {images.dtype}, expected uint8 (0..255); convert them when writing the file"
        )
    if images.ndim not in (3, 4):
        raise UserError(f"{file}: images have shape {images.shape}, expected [N, H, W] or [N, H, W, C]")
    if not images.size:
        raise UserError(f"{file}: holds no image")
    return images[..., None] if images.ndim == 3 else images


def _checked_labels(labels: np.ndarray, num_images: int, file: pathlib.Path) -> np.ndarray:
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.dtype.kind not in "iu" or labels.shape != (num_images,) or labels.min() < 0:
        raise UserError(
            f"{file}: labels are {labels.dtype} {labels.shape} for {num_images} images, "
            f"expected integers from 0 on, shape ({num_images},)"
        )
    return labels.astype(np.int32)
