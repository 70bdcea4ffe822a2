"""Folders of images (EXTENSIONS), decoded batch by batch.

`data.dir` D holds D/train and D/test (or D/val), or the images of both splits, of which a hash of the path then makes
one in ten a test image. If these folders hold sub-folders, each is a class; if they hold the images themselves, the set
is unlabelled. A folder with both is refused.
"""

import os
import pathlib
from collections.abc import Iterable

import numpy as np

from jepa_jax.base.errors import UserError
from jepa_jax.base.files import user_path
from jepa_jax.config.groups import DataConfig
from jepa_jax.data.in_memory import num_used
from jepa_jax.data.photos.decode import MODES
from jepa_jax.data.photos.source import PhotoSource
from jepa_jax.data.readers.bounded import read_image_file
from jepa_jax.data.readers.undivided import is_test_name, name_digest

EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".npy")
ANY_CHANNELS = (".npy", ".tif", ".tiff")  # files that may have any number of channels
OF_PHONES = (".heic", ".heif")  # which neither Pillow nor OpenCV reads
SPLIT_FOLDERS = {"train": ("train",), "test": ("test", "val")}


class FolderSource(PhotoSource):
    def __init__(self, data: DataConfig, split: str):
        self._root, folders, paths = list_images(data.dir, split)
        self.divided = self._root == user_path(data.dir, "config.data.dir")
        self.classes = tuple(os.fsencode(name).decode(errors="backslashreplace") for name in folders)
        check_file_channels(data, paths)
        super().__init__(data, labelled=bool(self.classes))
        del paths[num_used(data, split, len(paths)) :]
        # Fixed-width arrays: a million names go to a worker in one memory copy.
        self._names = np.array([os.fsencode(path) for path in paths])
        if self.classes:
            number = {name: i for i, name in enumerate(folders)}
            self.labels = np.array([number[path.partition("/")[0]] for path in paths], np.int32)

    def __len__(self) -> int:
        return len(self._names)

    def name_of(self, index: int) -> str:
        return str(self._root / os.fsdecode(self._names[index]))

    def content(self, index: int) -> bytes:
        return read_image_file(self.name_of(index))


def check_file_channels(data: DataConfig, names: Iterable[str] = ("image",)) -> None:
    plain = (name for name in names if not name.lower().endswith(ANY_CHANNELS))
    if data.channels not in MODES and (name := next(plain, None)):
        raise UserError(
            f"config.data.channels = {data.channels}: use 1 (grey), 3 (RGB) or 4 (RGBA) for image files like {name}; "
            f"{', '.join(ANY_CHANNELS)} may have any number"
        )


def list_images(directory: str, split: str) -> tuple[pathlib.Path, tuple[str, ...], list[str]]:
    """Returns the folder of a split, the classes, and the paths of its images below that folder.

    The order is that of a hash of the path, so that the first n images are a mixture of all classes.
    """
    root = user_path(directory, "config.data.dir")
    if not directory or not root.is_dir():
        raise UserError(
            f"config.data.dir = {directory!r}: no such folder; folder needs D/train/<class>/*.jpg or D/<class>/*.jpg, "
            "or D/train/*.jpg or D/*.jpg for images without labels"
        )
    has_splits = (root / "train").is_dir()
    train, top = (root / "train", split_folder(root, split)) if has_splits else (root, root)
    classes, present = _class_folders(train), _class_folders(top)
    if classes and not present:
        raise UserError(f"{top}: has no class folders, but {train} has; sort its images into class folders too")
    if unknown := set(present) - set(classes):
        raise UserError(f"{top / min(unknown)}: a class that {train} does not have; rename or remove it")
    paths = _images_of(top, present) if classes else _listed(top)[1]
    empty = set(classes) - {path.partition("/")[0] for path in paths}
    if empty and top == train:
        place = top / min(empty)
        raise UserError(f"{place}: this class folder holds {no_images(place)}; add some or remove it")
    ordered = sorted((name_digest(os.fsencode(path)), path) for path in paths)
    if not has_splits:
        ordered = [item for item in ordered if is_test_name(item[0]) == (split == "test")]
    if not ordered:
        raise UserError(f"{top}: no image for the {split} split; add images or make the folders train and test")
    return top, classes, [path for _, path in ordered]


def split_folder(root: pathlib.Path, split: str) -> pathlib.Path:
    for name in SPLIT_FOLDERS[split]:
        if (root / name).is_dir():
            return root / name
    raise UserError(
        f"config.data.dir = {root}: has train but neither {' nor '.join(SPLIT_FOLDERS[split])}; add one of them, "
        f"or set data.dir = {root / 'train'} to test on a tenth of it"
    )


def _class_folders(folder: pathlib.Path) -> tuple[str, ...]:
    """Returns the names of the class folders, () for a folder of unlabelled images."""
    folders, files = _listed(folder)
    if folders and files:
        raise UserError(
            f"{folder / min(files)}: an image beside the folder {min(folders)}; sort all images into class folders, "
            "or none for images without labels"
        )
    if not folders and not files:
        raise UserError(f"{folder}: holds {no_images(folder)} and no class folders; add some")
    return tuple(sorted(folders))


def no_images(folder: pathlib.Path) -> str:
    """Returns that a folder holds no images, and what to do with the photographs of a phone."""
    phone = next((path.name for path in folder.rglob("*") if path.suffix.lower() in OF_PHONES), "")
    fix = f"; {phone} is not read: apt install libheif-examples, then heif-convert, makes it a JPEG" if phone else ""
    return f"no images ({', '.join(EXTENSIONS)}{fix})"


def _listed(folder: pathlib.Path) -> tuple[list[str], list[str]]:
    """Returns the names of the folders and of the images in a folder."""
    folders, files = [], []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir():
                folders.append(entry.name)
            elif entry.name.lower().endswith(EXTENSIONS) and not entry.name.startswith("."):
                if not entry.is_file() and os.path.exists(entry.path):  # reading a pipe would wait for ever
                    raise UserError(f"{entry.path}: not a regular file; remove it")
                files.append(entry.name)
    return [name for name in folders if not name.startswith(".")], files


def _images_of(top: pathlib.Path, classes: tuple[str, ...]) -> list[str]:
    """Returns the paths of all images in class folders below `top`, with forward slashes.

    Links are followed. Raises UserError for one that leads to a folder that is listed already: it would repeat images
    without end, or those of one class in another.
    """
    seen = {top.resolve(strict=True): top}
    paths = []
    waiting = [top / name for name in classes]
    while waiting:
        folder = waiting.pop()
        earlier = seen.setdefault(folder.resolve(strict=True), folder)
        if earlier != folder:
            raise UserError(f"{folder}: the same folder as {earlier}; remove the link")
        folders, files = _listed(folder)
        below = folder.relative_to(top).as_posix()
        paths += [f"{below}/{name}" for name in files]
        waiting += [folder / name for name in folders]
    return paths
