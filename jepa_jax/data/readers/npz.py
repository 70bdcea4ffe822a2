"""Images and labels in numpy's .npz: train.npz and test.npz in a folder, or one file with both splits."""

import math
import os
import pathlib
import zipfile
from collections.abc import Callable, Collection

import numpy as np

from jepa_jax.base.errors import UserError
from jepa_jax.config.groups import DataConfig
from jepa_jax.data.in_memory import Arrays
from jepa_jax.data.readers.bounded import DEFLATE_RATIO, check_fits, open_regular

ONE_SPLIT = {"image": ("image", "images", "x"), "label": ("label", "labels", "y")}
BOTH_SPLITS = {"image": ("x_{}", "{}_images"), "label": ("y_{}", "{}_labels")}
MOST_CLASSES = 1_000_000
HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


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
    stored = array_names(file)
    chosen = [_pick(stored, names["image"], file)]
    if not _holds_images_alone(stored):
        chosen.append(_pick(stored, names["label"], file))
    arrays = read_npz_file(file, chosen)
    images = _checked_images(arrays[chosen[0]], file)
    if len(chosen) == 1:
        return {"image": images}
    return {"image": images, "label": _checked_labels(arrays[chosen[1]], len(images), file)}


def array_names(file: pathlib.Path) -> list[str]:
    """Returns the names of the arrays of a .npz file; raises UserError if it cannot be read."""
    return list(_read(file, lambda name: False))


def read_npz_file(file: pathlib.Path, only: Collection[str] = ()) -> Arrays:
    """Returns the arrays of a .npz file, all or those named in `only`; raises UserError if it cannot be read.

    Reads no more than the file holds: what its headers claim is checked first.
    """
    arrays = _read(file, lambda name: not only or name in only)
    return {name: array for name, array in arrays.items() if array is not None}


def _read(file: pathlib.Path, wanted: Callable[[str], bool]) -> dict[str, np.ndarray | None]:
    """Returns the arrays of a file by name, None for those that are not wanted."""
    with open_regular(file) as stream:
        try:
            with zipfile.ZipFile(stream) as archive:
                members = {
                    i.filename.removesuffix(".npy"): i for i in archive.infolist() if i.filename.endswith(".npy")
                }
                size = os.fstat(stream.fileno()).st_size
                return {
                    name: _read_array(archive, info, size, file) if wanted(name) else None
                    for name, info in members.items()
                }
        except UserError:
            raise
        except Exception as error:  # zipfile and numpy raise nearly anything on damaged files
            reason = "no archive of arrays" if "not a zip file" in str(error) else str(error) or type(error).__name__
            raise UserError(f"{file}: not a readable .npz file ({reason}); write it with numpy.savez") from error


def _read_array(archive: zipfile.ZipFile, info: zipfile.ZipInfo, file_size: int, file: pathlib.Path) -> np.ndarray:
    with archive.open(info) as stream:
        version = np.lib.format.read_magic(stream)
        if version not in HEADERS:
            raise ValueError(f"{info.filename} has version {version} of the format")
        shape, _, dtype = HEADERS[version](stream)
        claimed, held = math.prod(shape) * dtype.itemsize, info.file_size - stream.tell()
    if dtype.hasobject:  # numpy would advise to trust the file
        raise ValueError("an array holds Python objects instead of numbers")
    stored = info.compress_type == zipfile.ZIP_STORED
    most = info.compress_size * (1 if stored else DEFLATE_RATIO) + DEFLATE_RATIO
    if claimed != held or info.compress_size > file_size or info.file_size > most:
        raise ValueError(f"{info.filename} claims {claimed:,} bytes, which the file does not hold")
    check_fits(claimed, file)
    with archive.open(info) as stream:
        return np.lib.format.read_array(stream, allow_pickle=False)


def _holds_images_alone(stored: Collection[str]) -> bool:
    both = {name.format(split) for name in BOTH_SPLITS["image"] for split in ("train", "test")}
    return set(stored) <= both | set(ONE_SPLIT["image"])


def _pick(stored: Collection[str], names: tuple[str, ...], file: pathlib.Path) -> str:
    for name in names:
        if name in stored:
            return name
    raise UserError(f"{file}: holds {', '.join(stored) or 'nothing'}; expected an array named {' or '.join(names)}")


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
    if labels.max() >= MOST_CLASSES:
        raise UserError(
            f"{file}: labels go up to {labels.max()}, and at most {MOST_CLASSES:,} classes are possible; number the "
            "classes from 0 on without gaps"
        )
    return labels.astype(np.int32)
