"""A folder of JPEG, PNG or WebP images, one sub-folder a class, decoded when a batch is asked for."""

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
from jepa_jax.data.in_memory import require_count

EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp")
SPLIT_FOLDERS = {"train": ("train",), "test": ("test", "val")}
TEST_SHARE = 10  # without split folders, one image in ten is a test image
ON_ERROR = ("refuse", "skip")


class FolderSource:
    """Lazily decoded images: the shorter side resized to `image_size`, then the centre cropped."""

    def __init__(
        self, directory: str, split: str, *, image_size: int, on_error: str, limit: int = 0, limit_key: str = ""
    ):
        if on_error not in ON_ERROR:
            raise UserError(f"data.on_error = {on_error}: unknown; use one of {', '.join(ON_ERROR)}")
        self._root, self.classes, names = list_images(directory, split)
        require_count(limit, len(names), limit_key)
        names = names[: limit or None]
        # Fixed-width arrays: a million names go to a worker in one memory copy.
        self._names = np.array([os.fsencode(name) for name, _ in names])
        self._labels = np.array([label for _, label in names], np.int32)
        self._on_error = on_error
        self.image_shape = (image_size, image_size, 3)

    def __len__(self) -> int:
        return len(self._labels)

    def batch(self, indices: np.ndarray) -> dict[str, Any]:
        indices = np.asarray(indices)
        images = np.empty((len(indices), *self.image_shape), np.uint8)
        labels = np.empty(len(indices), np.int32)

        def load(place: int) -> list[str]:
            images[place], labels[place], skipped = self._readable(int(indices[place]))
            return skipped

        if multiprocessing.parent_process() is None:  # decoding releases the interpreter lock
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                skipped = list(pool.map(load, range(len(indices))))
        else:  # one of several worker processes: they are the parallelism
            skipped = [load(place) for place in range(len(indices))]
        return {"image": images, "label": labels, "skipped": [name for names in skipped for name in names]}

    def _readable(self, index: int) -> tuple[np.ndarray, int, list[str]]:
        """The image at `index` or, when skipping, the next one that can be read, and the files passed over."""
        skipped: list[str] = []
        for candidate in range(index, index + len(self)):
            candidate %= len(self)
            file = self._root / os.fsdecode(self._names[candidate])
            try:
                return decode(file, self.image_shape[0]), self._labels[candidate], skipped
            except Exception as error:  # image libraries raise nearly anything on damaged files
                if self._on_error == "refuse":
                    raise UserError(
                        f"{file}: cannot be read as an image ({type(error).__name__}: {error}); "
                        "remove the file, or set data.on_error = skip"
                    ) from error
                skipped.append(str(file))
        raise UserError(f"{self._root}: not one of its {len(self)} images can be read; check the files")


def decode(file: pathlib.Path | io.BytesIO, size: int) -> np.ndarray:
    """uint8 [size, size, 3]; shorter side resized (antialiased bilinear), centre crop."""
    with Image.open(file) as stored:
        stored.draft("RGB", (2 * size, 2 * size))  # lets JPEG decode at a fraction of the size; no effect on others
        image = stored.convert("RGB")
    width, height = image.size
    scale = size / min(width, height)
    width, height = max(size, round(width * scale)), max(size, round(height * scale))
    left, top = (width - size) // 2, (height - size) // 2
    resized = image.resize((width, height), Image.Resampling.BILINEAR)
    return np.asarray(resized.crop((left, top, left + size, top + size)))


def list_images(directory: str, split: str) -> tuple[pathlib.Path, tuple[str, ...], list[tuple[str, int]]]:
    """Root folder, class names and (path below the root, label) in an order fixed by the paths alone.

    The order is that of a hash, so the first n images are a mixture of all classes.
    """
    root = pathlib.Path(directory).expanduser()
    if not directory or not root.is_dir():
        raise UserError(
            f"data.dir = {directory!r}: no such folder; folder needs D/train/<class>/*.jpg or D/<class>/*.jpg"
        )
    has_splits = (root / "train").is_dir()
    class_root = root / "train" if has_splits else root
    classes = _sub_folders(class_root)
    if not classes:
        raise UserError(f"{class_root}: no class folders; put the images of each class into a folder of its own")
    top = _split_folder(root, split) if has_splits else root
    unknown = set(_sub_folders(top)) - set(classes)
    if unknown:
        raise UserError(f"{top / sorted(unknown)[0]}: a class that {class_root} does not have; rename or remove it")
    images = []
    for label, name in enumerate(classes):
        files = _image_files(top / name) if (top / name).is_dir() else []
        if not files and top == class_root:
            raise UserError(
                f"{top / name}: no image in this class folder ({', '.join(EXTENSIONS)}); add some or remove the folder"
            )
        images += [(f"{name}/{file}", label) for file in files]
    ordered = sorted((hashlib.sha1(os.fsencode(path)).digest(), path, label) for path, label in images)
    if not has_splits:
        ordered = [item for item in ordered if (item[0][-1] % TEST_SHARE == 0) == (split == "test")]
    if not ordered:
        raise UserError(f"{top}: no image for the {split} split; add images or make the folders train and test")
    return top, classes, [(path, label) for _, path, label in ordered]


def _split_folder(root: pathlib.Path, split: str) -> pathlib.Path:
    for name in SPLIT_FOLDERS[split]:
        if (root / name).is_dir():
            return root / name
    raise UserError(f"data.dir = {root}: has train but neither {' nor '.join(SPLIT_FOLDERS[split])}; add one of them")


def _sub_folders(path: pathlib.Path) -> tuple[str, ...]:
    return tuple(sorted(entry.name for entry in os.scandir(path) if entry.is_dir() and not entry.name.startswith(".")))


def _image_files(folder: pathlib.Path) -> list[str]:
    """Paths below `folder`, with forward slashes."""
    return [
        pathlib.PurePath(parent, name).relative_to(folder).as_posix()
        for parent, _, names in os.walk(folder, followlinks=True)
        for name in names
        if name.lower().endswith(EXTENSIONS) and not name.startswith(".")
    ]
