"""Any image classification set prepared by TFDS as ArrayRecord, read without TensorFlow."""

import io
import pathlib
from typing import Any

import numpy as np

from jepa_jax.base.errors import UserError
from jepa_jax.data.folder import decode
from jepa_jax.data.in_memory import require_count, require_size

SPLITS = {"train": ("train",), "test": ("test", "validation")}
CACHE_LIMIT_BYTES = 1 << 30  # decoded images are kept up to this size, so later epochs decode nothing


class TfdsSource:
    """A split of a prepared set; images are decoded on first use and kept when all of them fit in memory."""

    _records: Any  # opened on first use
    _cached: tuple[np.ndarray, np.ndarray, np.ndarray] | None  # images, labels, which of them are decoded

    def __init__(self, name: str, directory: str, split: str, *, image_size: int, limit: int = 0, limit_key: str = ""):
        self._name, self._directory = name, directory
        builder = _open_builder(name, directory)
        self._split = _split_name(builder, split)
        features = builder.info.features
        for key in ("image", "label"):
            if key not in features:
                raise UserError(
                    f"data.source = tfds:{name}: has no feature {key!r}; only image classification sets work"
                )
        height, width = features["image"].shape[:2]
        if height and width:  # unknown for photographs of any size, which are resized
            require_size((height, width), image_size, f"tfds:{name}")
        available = builder.info.splits[self._split].num_examples
        require_count(limit, available, limit_key)
        self._length = limit or available
        self.classes = tuple(features["label"].names)
        self.image_shape = (image_size, image_size, 3)
        self._forget()

    def __len__(self) -> int:
        return self._length

    def batch(self, indices: np.ndarray) -> dict[str, Any]:
        indices = np.asarray(indices)
        if self._cached is None:
            return dict(zip(("image", "label"), self._decode(indices), strict=True))
        images, labels, known = self._cached
        missing = np.unique(indices[~known[indices]])
        if len(missing):
            images[missing], labels[missing] = self._decode(missing)
            known[missing] = True
        return {"image": images[indices], "label": labels[indices]}

    def _decode(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if self._records is None:
            self._records = _open_records(_open_builder(self._name, self._directory), self._split)
        records = self._records.__getitems__(indices.tolist())
        images = np.empty((len(indices), *self.image_shape), np.uint8)
        for place, record in enumerate(records):
            try:
                images[place] = decode(io.BytesIO(record["image"]), self.image_shape[0])
            except Exception as error:  # image libraries raise nearly anything on damaged data
                raise UserError(
                    f"tfds:{self._name}, {self._split} record {indices[place]}: cannot be read as an image "
                    f"({type(error).__name__}: {error}); prepare the set again"
                ) from error
        return images, np.array([record["label"] for record in records], np.int32)

    def _forget(self) -> None:
        self._records = None
        self._cached = None
        shape = (self._length, *self.image_shape)
        if np.prod(shape) <= CACHE_LIMIT_BYTES:
            # The pages of np.empty cost nothing until they are written.
            self._cached = (np.empty(shape, np.uint8), np.empty(shape[0], np.int32), np.zeros(shape[0], bool))

    def __getstate__(self):
        return {key: value for key, value in self.__dict__.items() if key not in ("_records", "_cached")}

    def __setstate__(self, state):
        self.__dict__.update(state)
        self._forget()


def _open_builder(name: str, directory: str):
    try:
        import tensorflow_datasets as tfds
    except ImportError as error:
        raise UserError(
            f"data.source = tfds:{name}: needs a package that is missing ({error}); pip install 'jepa_jax[tfds]'"
        ) from error
    if not directory or not pathlib.Path(directory).expanduser().is_dir():
        raise UserError(f"data.dir = {directory!r}: no such folder; give the data_dir that tfds prepared {name} in")
    prepare = f"tfds.builder({name!r}, data_dir={directory!r}, file_format='array_record').download_and_prepare()"
    try:
        builder = tfds.builder(name, data_dir=str(pathlib.Path(directory).expanduser()))
    except (tfds.core.DatasetNotFoundError, ValueError, AssertionError) as error:
        first_line = str(error).partition("\n")[0]
        raise UserError(f"data.source = tfds:{name}: {first_line} Check the name and data.dir = {directory}") from error
    if not builder.is_prepared():
        raise UserError(f"data.dir = {directory}: holds no prepared {name}; prepare it with {prepare}")
    if builder.info.file_format is not tfds.core.FileFormat.ARRAY_RECORD:
        raise UserError(
            f"{builder.data_path}: prepared as {builder.info.file_format.value}, needs array_record; "
            f"prepare it with {prepare}"
        )
    return builder


def _open_records(builder, split: str):
    import tensorflow_datasets as tfds

    return builder.as_data_source(split=split, decoders={"image": tfds.decode.SkipDecoding()})


def _split_name(builder, split: str) -> str:
    for name in SPLITS[split]:
        if name in builder.info.splits:
            return name
    raise UserError(
        f"data.source = tfds:{builder.name}: has no {split} split, only {', '.join(builder.info.splits)}; "
        "use another set"
    )
