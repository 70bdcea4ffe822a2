"""Image sets prepared by TFDS as ArrayRecord, read without TensorFlow."""

import json
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from jepa_jax.base.classes import trust_files
from jepa_jax.base.errors import UserError
from jepa_jax.base.files import user_path
from jepa_jax.config.groups import DataConfig
from jepa_jax.data.contract import sample
from jepa_jax.data.in_memory import Arrays, check_image_size, num_used
from jepa_jax.data.photos.source import PhotoSource
from jepa_jax.data.readers.folder import check_file_channels

CLASS_KEYS = ("type", "pythonClassName", "python_class_name")  # of features.json
SPLITS = {"train": ("train",), "test": ("test", "validation")}
CACHE_LIMIT_BYTES = 1 << 30  # decoded images are kept up to this size, so later epochs decode nothing


class TfdsSource(PhotoSource):
    """A split of a prepared set; images are decoded on first use and kept when all of them fit in memory."""

    fix = "prepare the set again"
    _records: Any  # opened on first use
    _cached: Arrays | None  # the elements decoded so far
    _known: np.ndarray  # which of them are decoded

    def __init__(self, data: DataConfig, split: str):
        check_file_channels(data)
        self._name, self._directory = data.source.removeprefix("tfds:"), data.dir
        builder = _open_builder(self._name, data.dir)
        self._split = _split_name(builder, split)
        features = builder.info.features
        if "image" not in features:
            raise UserError(f"config.data.source = {data.source}: has no feature 'image'; use a set of images")
        height, width = features["image"].shape[:2]
        if height and width:  # unknown for photographs of any size, which are resized
            check_image_size(height, width, data)
        available = builder.info.splits[self._split].num_examples
        self._chosen = sample(available, num_used(data, split, available))
        self.classes = tuple(features["label"].names) if "label" in features else ()
        super().__init__(data, labelled="label" in features)
        self._forget()

    def __len__(self) -> int:
        return len(self._chosen)

    def name_of(self, index: int) -> str:
        return f"tfds:{self._name}, {self._split} record {self._chosen[index]}"

    def content(self, index: int) -> bytes:
        if self._records is None:
            import tensorflow_datasets as tfds

            builder = _open_builder(self._name, self._directory)
            decoders = {"image": tfds.decode.SkipDecoding()}
            self._records = builder.as_data_source(split=self._split, decoders=decoders)
        try:
            record = self._records[int(self._chosen[index])]
        except Exception as error:  # the reader of records raises nearly anything on damaged files
            raise UserError(
                f"tfds:{self._name}, {self._split}: records cannot be read ({type(error).__name__}: {error}); prepare "
                "the set again"
            ) from error
        self._labels[index] = record.get("label", 0)
        return record["image"]

    def labels_of(self, indices: np.ndarray) -> np.ndarray:
        return self._labels[indices]

    def batch(self, indices: np.ndarray) -> dict[str, Any]:
        indices = np.asarray(indices)
        if self._cached is None:
            return super().batch(indices)
        skipped: list[str] = []
        missing = np.unique(indices[~self._known[indices]])
        if len(missing):
            decoded = super().batch(missing)
            for key, array in self._cached.items():
                array[missing] = decoded[key]
            self._known[missing] = True
            skipped = decoded["skipped"]  # said once: later batches take what stands in from memory
        return {key: array[indices] for key, array in self._cached.items()} | {"skipped": skipped}

    def _forget(self) -> None:
        self._records = None
        self._labels = np.zeros(len(self), np.int32)  # of what has been read
        self._cached = None
        if len(self) * self.spec["image"].size <= CACHE_LIMIT_BYTES:
            # The pages of np.empty cost nothing until they are written.
            self._cached = {key: np.empty((len(self), *one.shape), one.dtype) for key, one in self.spec.items()}
            self._known = np.zeros(len(self), bool)

    def __getstate__(self) -> dict[str, Any]:
        opened = ("_records", "_labels", "_cached", "_known")
        return {key: value for key, value in self.__dict__.items() if key not in opened}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()


def _open_builder(name: str, directory: str) -> Any:
    import tensorflow_datasets as tfds

    folder = user_path(directory or tfds.core.constants.DATA_DIR, "config.data.dir")
    if not folder.is_dir():
        raise UserError(f"config.data.dir = {str(folder)!r}: no such folder; give the data_dir of the prepared {name}")
    prepare = f"tfds.builder({name!r}, data_dir={str(folder)!r}, file_format='array_record').download_and_prepare()"
    for path in sorted((folder / re.split("[/:]", name)[0]).rglob("features.json")):
        refuse_foreign_features(path)
    try:
        builder = tfds.builder(name, data_dir=str(folder))
    except tfds.core.DatasetNotFoundError as error:
        infos = [*folder.glob("*/*/dataset_info.json"), *folder.glob("*/*/*/dataset_info.json")]
        there = sorted({info.parents[1].relative_to(folder).as_posix() for info in infos})
        raise UserError(
            f"config.data.source = tfds:{name}: no such data set; {folder} holds {', '.join(there) or 'none'}"
        ) from error
    except Exception as error:  # damaged descriptions raise nearly anything
        reason = str(error).partition("\n")[0]
        raise UserError(f"config.data.source = tfds:{name}: {reason} Check the name and config.data.dir") from error
    if not builder.is_prepared():
        raise UserError(f"config.data.dir = {folder}: holds no prepared {name}; prepare it with {prepare}")
    if builder.info.file_format is not tfds.core.FileFormat.ARRAY_RECORD:
        raise UserError(
            f"{builder.data_path}: prepared as {builder.info.file_format.value}, needs array_record; "
            f"prepare it with {prepare}"
        )
    return builder


def refuse_foreign_features(path: pathlib.Path) -> None:
    """Raises UserError if a description of features names a class outside of TFDS, which imports what is named."""
    try:
        found = set(_class_names(json.loads(path.read_text())))
    except (OSError, ValueError, RecursionError):
        return  # TFDS refuses it
    if not trust_files and (foreign := sorted(name for name in found if not name.startswith("tensorflow_datasets."))):
        raise UserError(
            f"{path}: names {foreign[0]}, and importing it runs its code; add --trust if you know where the file comes "
            "from (in Python: with jepa_jax.trust_files())"
        )


def _class_names(value: Any) -> Iterator[str]:
    """Yields every dotted name under a key that names a class, at any depth."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        if key in CLASS_KEYS and isinstance(inner, str) and "." in inner:
            yield inner
        yield from _class_names(inner)


def _split_name(builder: Any, split: str) -> str:
    for name in SPLITS[split]:
        if name in builder.info.splits:
            return name
    raise UserError(
        f"config.data.source = tfds:{builder.name}: has no {split} split, only {', '.join(builder.info.splits)}; "
        "use another set"
    )
