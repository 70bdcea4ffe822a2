"""Images and labels in numpy's .npz: train.npz and test.npz in a folder, or one file, with both splits or undivided."""

import pathlib
import zipfile
from collections.abc import Callable, Collection

import numpy as np

from jepa_jax.base.errors import UserError
from jepa_jax.base.files import user_path
from jepa_jax.config.groups import DataConfig
from jepa_jax.data.contract import MAP
from jepa_jax.data.in_memory import Arrays
from jepa_jax.data.photos.crops import centre_of
from jepa_jax.data.photos.decode import eight_bits, is_sixteen_bits, read_array
from jepa_jax.data.readers.bounded import check_classes, check_fits, open_regular
from jepa_jax.data.readers.undivided import drawn_part

# Names of arrays, in any case; {} is the name of a split.
ONE_SPLIT = {"image": ("image", "images", "x", "data"), "label": ("label", "labels", "y", "target", "targets")}
BOTH_SPLITS = {
    "image": ("x_{}", "{}_x", "{}_images", "images_{}", "{}_data"),
    "label": ("y_{}", "{}_y", "{}_labels", "labels_{}", "{}_targets"),
}
SPLIT_NAMES = {"train": ("train",), "test": ("test", "val", "validation")}


def read_npz(data: DataConfig, split: str) -> Arrays:
    """Reads images uint8 [N, size, size, C] (C = 1 for stored [N, H, W]) and labels int32 [N] of one split.

    Labels [N, H, W] are maps: a class for each pixel, 255 for an unknown one. Images of another size are resized as
    photographs are: the shorter side, then the centre. Images with maps have the size that the config says. A file
    that holds images alone is unlabelled. A file with any other array must have labels for the split, so that
    labels under an unexpected name are not dropped silently.

    `data.dir` is a folder with train.npz and test.npz (or val.npz), whose arrays are named as in ONE_SPLIT; one file
    with the names of BOTH_SPLITS; or one file with the names of ONE_SPLIT, of which one image in ten is a test image.
    """
    place = user_path(data.dir, "config.data.dir")
    if not data.dir or not place.exists():
        raise UserError(
            f"config.data.dir = {data.dir!r}: no such file or folder; npz needs a .npz file or a folder with train.npz "
            "and test.npz"
        )
    file = _file_of(place, split)
    stored = list(_read(file, lambda name: False))
    of_split = {kind: _named(names, split) for kind, names in BOTH_SPLITS.items()}
    divided = place.is_file() and not any(name.lower() in of_split["image"] for name in stored)
    if divided and not any(name.lower() in ONE_SPLIT["image"] for name in stored):
        divided = False  # says that the names of both splits are missing
    names = ONE_SPLIT if place.is_dir() or divided else of_split
    chosen = [_pick(stored, names["image"], file)]
    if not _holds_images_alone(stored):
        chosen.append(_pick(stored, names["label"], file))
    arrays = read_npz_file(file, chosen)
    found = {"image": _checked_images(arrays[chosen[0]], file)}
    if len(chosen) > 1:
        labels = arrays[chosen[1]]
        if labels.ndim == 3 and labels.shape[2] > 1:
            found[MAP] = _checked_maps(labels, found["image"].shape, data.image_size, file)
        else:
            found["label"] = _checked_labels(labels, len(found["image"]), file)
    if divided:
        part = drawn_part(len(found["image"]), split, file)
        found = {name: array[part] for name, array in found.items()}
    size, shorter_side = data.image_size, data.shorter_side
    if found["image"].shape[1:3] != (size, size) or shorter_side not in (0, size):
        found["image"] = np.stack([centre_of(image, size, shorter_side) for image in found["image"]])
    return found


def _file_of(place: pathlib.Path, split: str) -> pathlib.Path:
    if not place.is_dir():
        return place
    files = [place / f"{name}.npz" for name in SPLIT_NAMES[split]]
    if found := [file for file in files if file.exists()]:
        return found[0]
    raise UserError(f"{files[0]}: missing; a folder of npz data holds train.npz and test.npz")


def _named(patterns: tuple[str, ...], split: str) -> tuple[str, ...]:
    return tuple(pattern.format(name) for pattern in patterns for name in SPLIT_NAMES[split])


def read_npz_file(file: pathlib.Path, only: Collection[str] = ()) -> Arrays:
    """Returns the arrays of a .npz file, all or those named in `only`; raises UserError if it cannot be read.

    Reads no more than the file holds: what its headers claim is checked first.
    """
    arrays = _read(file, lambda name: not only or name in only)
    return {name: array for name, array in arrays.items() if array is not None}


def _read(file: pathlib.Path, wanted: Callable[[str], bool]) -> dict[str, np.ndarray | None]:
    with open_regular(file) as stream:
        try:
            with zipfile.ZipFile(stream) as archive:
                members = {
                    i.filename.removesuffix(".npy"): i for i in archive.infolist() if i.filename.endswith(".npy")
                }
                return {
                    name: _read_array(archive, info, file) if wanted(name) else None for name, info in members.items()
                }
        except UserError:
            raise
        except Exception as error:  # zipfile and numpy raise nearly anything on damaged files
            reason = "no archive of arrays" if "not a zip file" in str(error) else str(error) or type(error).__name__
            raise UserError(f"{file}: not a readable .npz file ({reason}); write it with numpy.savez") from error


def _read_array(archive: zipfile.ZipFile, info: zipfile.ZipInfo, file: pathlib.Path) -> np.ndarray:
    check_fits(info.file_size, file)
    try:
        with archive.open(info) as stream:
            return read_array(stream, info.file_size)
    except ValueError as error:
        raise ValueError(f"{info.filename}: {error}") from error


def _holds_images_alone(stored: Collection[str]) -> bool:
    both = {name for split in SPLIT_NAMES for name in _named(BOTH_SPLITS["image"], split)}
    return {name.lower() for name in stored} <= both | set(ONE_SPLIT["image"])


def _pick(stored: Collection[str], names: tuple[str, ...], file: pathlib.Path) -> str:
    lower = {name.lower(): name for name in stored}
    for name in names:
        if name in lower:
            return lower[name]
    raise UserError(f"{file}: holds {', '.join(stored) or 'nothing'}; expected an array named {' or '.join(names)}")


def _checked_images(images: np.ndarray, file: pathlib.Path) -> np.ndarray:
    if images.ndim not in (3, 4):
        raise UserError(f"{file}: images have shape {images.shape}, expected [N, H, W] or [N, H, W, C]")
    if not images.size:
        raise UserError(f"{file}: holds no image")
    if is_sixteen_bits(images) and 0 < images.max() <= 255:  # their upper 8 bits would be black images
        raise UserError(
            f"{file}: images are uint16 but go up to {images.max()} alone; store them as uint8, or spread 16 bits over "
            "0..65535"
        )
    try:
        images = eight_bits(images)
    except ValueError as error:
        raise UserError(f"{file}: images are {error}") from error
    return images[..., None] if images.ndim == 3 else images


def _checked_maps(maps: np.ndarray, images: tuple[int, ...], size: int, file: pathlib.Path) -> np.ndarray:
    if maps.dtype.kind not in "iu" or maps.shape != images[:3] or maps.min() < 0 or maps.max() > 255:
        raise UserError(
            f"{file}: labels are {maps.dtype} {maps.shape} for images {images}; maps hold a class from 0 to 254, or "
            "255, for each pixel"
        )
    if maps.shape[1:] != (size, size):
        fix = "maps are not resized; store both at that size, or set data.image_size"
        raise UserError(f"{file}: maps of {maps.shape[1]} x {maps.shape[2]} for data.image_size = {size}; {fix}")
    return maps.astype(np.uint8)


def _checked_labels(labels: np.ndarray, num_images: int, file: pathlib.Path) -> np.ndarray:
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.dtype.kind not in "iu" or labels.shape != (num_images,) or labels.min() < 0:
        raise UserError(
            f"{file}: labels are {labels.dtype} {labels.shape} for {num_images} images, "
            f"expected integers from 0 on, shape ({num_images},)"
        )
    check_classes(labels.max(), file)
    return labels.astype(np.int32)
