"""Images and labels in numpy's .npz: train.npz and test.npz in a folder, or one file with both splits."""

import pathlib
import zipfile
import zlib

import numpy as np

from jepa_jax.base.errors import UserError
from jepa_jax.data.in_memory import Arrays

ONE_SPLIT = {"image": ("image", "images", "x"), "label": ("label", "labels", "y")}
BOTH_SPLITS = {"image": ("x_{}", "{}_images"), "label": ("y_{}", "{}_labels")}


def read_npz(path: str, split: str) -> Arrays:
    """Images uint8 [N, H, W, 3] and labels int32 [N]; grey images are repeated to three channels."""
    place = pathlib.Path(path).expanduser()
    if not path or not place.exists():
        raise UserError(
            f"data.dir = {path!r}: no such file or folder; npz needs a .npz file or a folder with train.npz "
            "and test.npz"
        )
    file = place / f"{split}.npz" if place.is_dir() else place
    names = ONE_SPLIT if place.is_dir() else {k: tuple(n.format(split) for n in v) for k, v in BOTH_SPLITS.items()}
    if not file.exists():
        raise UserError(f"{file}: missing; a folder of npz data holds train.npz and test.npz")
    try:
        with np.load(file, allow_pickle=False) as content:
            images, labels = _pick(content, names["image"], file), _pick(content, names["label"], file)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(f"{file}: not a readable .npz file ({error}); write it with numpy.savez") from error
    return _checked(images, labels, file)


def _pick(content, names: tuple[str, ...], file: pathlib.Path) -> np.ndarray:
    for name in names:
        if name in content:
            return content[name]
    raise UserError(f"{file}: holds {', '.join(content) or 'nothing'}; expected an array named {' or '.join(names)}")


def _checked(images: np.ndarray, labels: np.ndarray, file: pathlib.Path) -> Arrays:
    if images.dtype != np.uint8:
        raise UserError(
            f"{file}: images are {images.dtype}, expected uint8 (0..255); convert them when writing the file"
        )
    if images.ndim == 3:
        images = images[..., None]
    if images.ndim != 4 or images.shape[-1] not in (1, 3):
        raise UserError(f"{file}: images have shape {images.shape}, expected [N, H, W], [N, H, W, 1] or [N, H, W, 3]")
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.dtype.kind not in "iu" or labels.shape != images.shape[:1] or (labels.size and labels.min() < 0):
        raise UserError(
            f"{file}: labels are {labels.dtype} {labels.shape} for {len(images)} images, "
            f"expected integers from 0 on, shape ({len(images)},)"
        )
    if not len(images):
        raise UserError(f"{file}: holds no image")
    if images.shape[-1] == 1:
        images = np.repeat(images, 3, axis=-1)
    return images, labels.astype(np.int32)
