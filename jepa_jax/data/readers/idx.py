"""The MNIST family: IDX files of grey images and labels, plain or .gz."""

import gzip
import math
import os
import pathlib
import zlib

import numpy as np

from jepa_jax.base.errors import UserError
from jepa_jax.base.files import user_path
from jepa_jax.config.groups import DataConfig
from jepa_jax.data.in_memory import Arrays
from jepa_jax.data.readers.bounded import check_fits, open_regular

PREFIXES = {"train": ("train",), "test": ("t10k", "test")}
MOST_PACKED = 1032  # bytes that gzip packs into one
IMAGES, LABELS = 3, 1  # number of axes, the last byte of the magic number


def read_idx(data: DataConfig, split: str) -> Arrays:
    """Reads grey images uint8 [N, S, S, 1], zero-padded to `data.image_size`, and labels int32 [N] of one split."""
    path = user_path(data.dir, "config.data.dir")
    if not data.dir or not path.is_dir():
        raise UserError(f"config.data.dir = {data.dir!r}: no such folder; idx needs a folder of -idx3-ubyte files")
    images_file = _find(path, split, "images", IMAGES)
    labels_file = _find(path, split, "labels", LABELS)
    images, labels = _read(images_file, IMAGES), _read(labels_file, LABELS)
    if len(images) != len(labels):
        raise UserError(
            f"{labels_file}: {len(labels)} labels for {len(images)} images in {images_file.name}; "
            "take both files from the same set"
        )
    return {"image": _padded(images, data.image_size, images_file), "label": labels.astype(np.int32)}


def _find(directory: pathlib.Path, split: str, kind: str, axes: int) -> pathlib.Path:
    """Returns the one file of this kind; torchvision keeps it in `raw`, some mirrors write a dot for the dash."""
    found = [
        file
        for folder in (directory, directory / "raw")
        for prefix in PREFIXES[split]
        for ending in ("", ".gz")
        for file in sorted(folder.glob(f"*{prefix}-{kind}[-.]idx{axes}-ubyte{ending}"))
    ]
    if not found:
        name = f"{PREFIXES[split][0]}-{kind}-idx{axes}-ubyte[.gz]"
        raise UserError(f"{directory / name}: missing; put the four files of the set into config.data.dir")
    sets = {file.name.removesuffix(".gz") for file in found}
    if len(sets) > 1:
        raise UserError(f"{directory}: holds several sets ({', '.join(sorted(sets))}); keep one per folder")
    return found[0]


def _read(file: pathlib.Path, axes: int) -> np.ndarray:
    """Returns the array of a file; reads no more than its header claims, if that fits into memory."""
    with open_regular(file) as raw:
        try:
            stream = gzip.GzipFile(fileobj=raw) if file.suffix == ".gz" else raw
            shape = _shape(stream.read(4 + 4 * axes), axes, file)
            expected = math.prod(shape)
            held = os.fstat(raw.fileno()).st_size * (1 if stream is raw else MOST_PACKED)
            check_fits(expected, file)
            data = stream.read(min(expected, held) + 1)
        except (OSError, EOFError, zlib.error) as error:
            raise UserError(f"{file}: cannot be read ({error}); the file is damaged: download it again") from error
    if len(data) != expected:
        raise UserError(
            f"{file}: {'more' if len(data) > expected else 'less'} than the {expected:,} bytes that it claims; the "
            "file is damaged: download it again"
        )
    return np.frombuffer(data, np.uint8).reshape(shape)


def _shape(header: bytes, axes: int, file: pathlib.Path) -> tuple[int, ...]:
    magic = bytes([0, 0, 8, axes])  # 8: unsigned bytes
    if len(header) < 4 + 4 * axes or header[:4] != magic:
        raise UserError(
            f"{file}: starts with {header[:4].hex()}, expected {magic.hex()}; this is not the expected IDX file"
        )
    shape = tuple(int(n) for n in np.frombuffer(header, ">u4", count=axes, offset=4))
    if 0 in shape:
        raise UserError(f"{file}: holds nothing (shape {shape}); download it again")
    return shape


def _padded(images: np.ndarray, image_size: int, file: pathlib.Path) -> np.ndarray:
    height, width = images.shape[1:]
    if image_size < max(height, width):
        raise UserError(
            f"config.data.image_size = {image_size}: {file} has images of {height} x {width} pixels; "
            f"set data.image_size = {max(height, width)}, or larger to pad with zeros"
        )
    padded = np.zeros((len(images), image_size, image_size), np.uint8)
    top, left = (image_size - height) // 2, (image_size - width) // 2
    padded[:, top : top + height, left : left + width] = images
    return padded[..., None]
