"""Folders of JPEG, PNG or WebP images, decoded batch by batch.

`data.dir` D holds D/train and D/test (or D/val), or the images of both splits, of which a hash of the path then makes
one in ten a test image. If these folders hold sub-folders, each is a class; if they hold the images themselves, the set
is unlabelled. A folder with both is refused.
"""

import hashlib
import io
import multiprocessing
import os
import pathlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from PIL import Image

from jepa_jax.base.errors import UserError
from jepa_jax.config.groups import DataConfig
from jepa_jax.data.contract import image_spec
from jepa_jax.data.in_memory import num_used

EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp")
# Of what the files hold, whatever their names say; Pillow would run a program for some others.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
MODES = {1: "L", 3: "RGB", 4: "RGBA"}  # by channels
SPLIT_FOLDERS = {"train": ("train",), "test": ("test", "val")}
TEST_SHARE = 10  # without split folders, one image in ten is a test image


class FolderSource:
    """Lazily decoded images: the shorter side resized to `data.image_size`, then the centre cropped."""

    def __init__(self, data: DataConfig, split: str):
        check_file_channels(data)
        self._on_error = data.on_error
        self._root, self.classes, paths = list_images(data.dir, split)
        del paths[num_used(data, split, len(paths)) :]
        # Fixed-width arrays: a million names go to a worker in one memory copy.
        self._names = np.array([os.fsencode(path) for path in paths])
        self.spec = image_spec(data.image_size, data.channels, labelled=bool(self.classes))
        self.labels: np.ndarray | None = None
        if self.classes:
            number = {name: i for i, name in enumerate(self.classes)}
            self.labels = np.array([number[path.partition("/")[0]] for path in paths], np.int32)

    def __len__(self) -> int:
        return len(self._names)

    def batch(self, indices: np.ndarray) -> dict[str, Any]:
        if multiprocessing.parent_process() is None:  # decoding releases the interpreter lock
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                decoded = list(pool.map(self._readable, indices))
        else:  # one of several worker processes: they are the parallelism
            decoded = list(map(self._readable, indices))
        images, used, skipped = zip(*decoded, strict=True)
        batch: dict[str, Any] = {"image": np.stack(images)}
        if self.labels is not None:
            batch["label"] = self.labels[np.array(used)]
        return batch | {"skipped": [name for names in skipped for name in names]}

    def _readable(self, index: int) -> tuple[np.ndarray, int, list[str]]:
        """Returns the image at `index` or, when skipping, the next readable one, its index, and the files skipped."""
        skipped: list[str] = []
        size, _, channels = self.spec["image"].shape
        for candidate in range(index, index + len(self)):
            candidate %= len(self)
            file = self._root / os.fsdecode(self._names[candidate])
            try:
                return decode(file, size, channels), candidate, skipped
            except Exception as error:  # image libraries raise nearly anything on damaged files
                if self._on_error == "refuse":
                    raise UserError(
                        f"{file}: cannot be read as an image ({type(error).__name__}: {error}); "
                        "remove the file, or set data.on_error = skip"
                    ) from error
                skipped.append(str(file))
        raise UserError(f"{self._root}: none of its {len(self)} images can be read; check the files")


def check_file_channels(data: DataConfig) -> None:
    """Raises UserError for a number of channels that image files cannot be converted to."""
    if data.channels not in MODES:
        raise UserError(f"config.data.channels = {data.channels}: use 1 (grey), 3 (RGB) or 4 (RGBA) for image files")


def decode(file: pathlib.Path | io.BytesIO, size: int, channels: int = 3) -> np.ndarray:
    """Returns uint8 [size, size, channels]: the shorter side resized (antialiased bilinear), the centre cropped."""
    with Image.open(file, formats=FORMATS) as stored:
        # Lets JPEG decode at a fraction of the size; no effect on other formats.
        stored.draft("L" if channels == 1 else "RGB", (2 * size, 2 * size))
        image = stored.convert(MODES[channels])
    width, height = image.size
    scale = size / min(width, height)
    width, height = max(size, round(width * scale)), max(size, round(height * scale))
    left, top = (width - size) // 2, (height - size) // 2
    resized = image.resize((width, height), Image.Resampling.BILINEAR)
    return np.asarray(resized.crop((left, top, left + size, top + size))).reshape(size, size, channels)


def list_images(directory: str, split: str) -> tuple[pathlib.Path, tuple[str, ...], list[str]]:
    """Returns the folder of a split, the classes, and the paths of its images below that folder.

    The order is that of a hash of the path, so that the first n images are a mixture of all classes.
    """
    root = pathlib.Path(directory).expanduser()
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
        raise UserError(
            f"{top / min(empty)}: no image in this class folder ({', '.join(EXTENSIONS)}); add some or remove it"
        )
    ordered = sorted((hashlib.sha1(os.fsencode(path)).digest(), path) for path in paths)
    if not has_splits:
        ordered = [item for item in ordered if (item[0][-1] % TEST_SHARE == 0) == (split == "test")]
    if not ordered:
        raise UserError(f"{top}: no image for the {split} split; add images or make the folders train and test")
    return top, classes, [path for _, path in ordered]


def split_folder(root: pathlib.Path, split: str) -> pathlib.Path:
    """Returns the folder of a split; raises UserError if there is none."""
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
        raise UserError(f"{folder}: holds no images ({', '.join(EXTENSIONS)}) and no class folders; add some")
    return tuple(sorted(folders))


def _listed(folder: pathlib.Path) -> tuple[list[str], list[str]]:
    """Returns the names of the folders and of the images in a folder."""
    folders, files = [], []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir():
                folders.append(entry.name)
            elif _is_image(entry.name):
                if not entry.is_file() and os.path.exists(entry.path):  # reading a pipe would wait for ever
                    raise UserError(f"{entry.path}: not a regular file; remove it")
                files.append(entry.name)
    return [name for name in folders if not name.startswith(".")], files


def _images_of(top: pathlib.Path, classes: tuple[str, ...]) -> list[str]:
    """Returns the paths of all images in class folders below `top`, with forward slashes.

    Links are followed. Raises UserError for one that leads to a folder that is listed already: it would repeat images
    without end, or those of one class in another.
    """
    seen = {_identity(top): top}
    paths = []
    waiting = [top / name for name in classes]
    while waiting:
        folder = waiting.pop()
        earlier = seen.setdefault(_identity(folder), folder)
        if earlier != folder:
            raise UserError(f"{folder}: the same folder as {earlier}; remove the link")
        folders, files = _listed(folder)
        below = folder.relative_to(top).as_posix()
        paths += [f"{below}/{name}" for name in files]
        waiting += [folder / name for name in folders]
    return paths


def _identity(folder: pathlib.Path) -> tuple[int, int]:
    found = folder.stat()
    return found.st_dev, found.st_ino


def _is_image(name: str) -> bool:
    return name.lower().endswith(EXTENSIONS) and not name.startswith(".")
