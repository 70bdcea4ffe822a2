"""Image data sets of Hugging Face on disk: parquet files with a column of images, read row group by row group.

`data.dir` D holds D/train-*.parquet and D/test-*.parquet (or validation-*, val-*), in D itself or in D/data; without
test files, one image in ten is a test image. The column of images holds structs with `bytes`, as the library datasets
writes them, or bytes. Labels are integers; their names come from the description that the files carry.
"""

import json
import pathlib
import re
from typing import Any

import numpy as np

from jepa_jax.base.classes import import_extra
from jepa_jax.base.errors import UserError
from jepa_jax.base.files import user_path
from jepa_jax.config.groups import DataConfig
from jepa_jax.data.contract import sample
from jepa_jax.data.in_memory import num_used
from jepa_jax.data.photos.source import PackedPhotos
from jepa_jax.data.readers import bounded
from jepa_jax.data.readers.bounded import check_classes, check_fits, open_regular
from jepa_jax.data.readers.undivided import drawn_part

SPLITS = {"train": ("train",), "test": ("test", "validation", "val", "valid")}
IMAGE_COLUMNS, LABEL_COLUMNS = ("image", "img"), ("label", "labels", "fine_label")
CACHE_BYTES = 2**28  # of row groups that each process keeps


class ParquetSource(PackedPhotos):
    fix = "download the file again, or set data.on_error = skip"

    def __init__(self, data: DataConfig, split: str):
        files, divided = split_files(data.dir, split)
        self._groups: list[tuple[str, int]] = []  # file and number of each row group
        counts: list[int] = []
        schema = open_parquet(files[0]).schema_arrow
        self._image = image_column(files[0])
        label = next((name for name in LABEL_COLUMNS if name in schema.names), None)
        for file in files:
            opened = open_parquet(file)
            if image_column(file) != self._image or (label and label not in opened.schema_arrow.names):
                raise UserError(f"{file}: has other columns than {files[0].name}; give both the same")
            for group in range(opened.num_row_groups):
                self._groups.append((str(file), group))
                counts.append(opened.metadata.row_group(group).num_rows)
        self._ends = np.cumsum(counts)
        available = int(self._ends[-1]) if counts else 0
        if not available:
            raise UserError(f"{files[0]}: holds no image; check the files")
        self.divided = divided
        rows = drawn_part(available, split, files[0]) if divided else np.arange(available)
        self._chosen = rows[sample(len(rows), num_used(data, split, len(rows)))]
        super().__init__(data, labelled=label is not None)
        if label is not None:
            labels = read_labels(files, label)
            self.classes = class_names(schema, label, labels)
            self.labels = labels[self._chosen]

    def name_of(self, index: int) -> str:
        number, place = self._place(index)
        file, group = self._groups[number]
        return f"{file}, row {place} of row group {group}"

    def content(self, index: int) -> bytes:
        number, place = self._place(index)
        stored = self._row_group(number)[place].as_py()
        content = stored["bytes"] if isinstance(stored, dict) else stored
        if not isinstance(content, bytes):
            raise ValueError("holds no bytes; images beside the parquet file are not read")
        return content

    def _row_group(self, number: int) -> Any:
        """Returns the images of a row group; the latest ones are kept."""
        with self._lock:
            if number in self._open:
                self._open.move_to_end(number)
                return self._open[number]
            file, group = self._groups[number]
            column = read_images(pathlib.Path(file), group, self._image)
            self._open[number] = column
            while len(self._open) > 1 and sum(kept.nbytes for kept in self._open.values()) > CACHE_BYTES:
                self._open.popitem(last=False)
            return column


def split_files(directory: str, split: str) -> tuple[list[pathlib.Path], bool]:
    """Returns the files of a split, and whether they are those of both splits, of which a part is meant."""
    root = user_path(directory, "config.data.dir")
    folders = [folder for folder in (root, root / "data") if folder.is_dir()] if directory else []
    files = sorted(file for folder in folders for file in folder.glob("*.parquet"))
    found = {
        kind: [file for file in files if re.match(rf"({'|'.join(names)})\b", file.name)]
        for kind, names in SPLITS.items()
    }
    if not found["train"]:
        raise UserError(
            f"config.data.dir = {directory!r}: no train-*.parquet there or in its folder data; give the folder of a "
            "data set of Hugging Face"
        )
    return (found[split], False) if found["test"] else (found["train"], True)


def read_images(file: pathlib.Path, group: int, name: str) -> Any:
    """Returns the images of a row group; one that is stored once and named in many rows is in memory once."""
    opened = open_parquet(file, read_dictionary=[name])
    row_group = opened.metadata.row_group(group)
    columns = map(row_group.column, range(row_group.num_columns))
    check_fits(sum(one.total_uncompressed_size for one in columns if one.path_in_schema == name), file)
    return opened.read_row_group(group, columns=[name]).column(0)


def image_column(file: pathlib.Path) -> str:
    opened = open_parquet(file)
    paths = [opened.schema.column(number).path for number in range(len(opened.schema))]
    for path in (path for name in IMAGE_COLUMNS for path in (name, f"{name}.bytes")):
        if path in paths:
            return path
    names = opened.schema_arrow.names
    raise UserError(f"{file}: has the columns {', '.join(names)}; images are in {' or '.join(IMAGE_COLUMNS)}")


def open_parquet(file: pathlib.Path, **options: Any) -> Any:
    parquet = import_extra("pyarrow.parquet", "config.data.source = parquet", "parquet")
    open_regular(file).close()
    try:
        return parquet.ParquetFile(file, **options)
    except Exception as error:  # damaged files raise nearly anything
        raise UserError(f"{file}: not a readable parquet file ({error}); download it again") from error


def read_labels(files: list[pathlib.Path], name: str) -> np.ndarray:
    parts = []
    for file in files:
        try:
            column = open_parquet(file).read(columns=[name]).column(0)
        except (OSError, ValueError, ArithmeticError) as error:  # of Arrow, for damaged files
            raise UserError(f"{file}: column {name} cannot be read ({error}); download it again") from error
        values = column.to_numpy() if column.null_count == 0 else np.array([np.nan])
        if values.dtype.kind not in "iu" or (values.size and values.min() < 0):
            gaps = f"{column.null_count} gaps"
            raise UserError(f"{file}: column {name} is {column.type} with {gaps}; labels are integers from 0 on")
        check_classes(int(values.max()) if values.size else 0, f"{file}: column {name}")
        parts.append(values)
    return np.concatenate(parts).astype(np.int32)


def class_names(schema: Any, label: str, labels: np.ndarray) -> tuple[str, ...]:
    """Returns the names that the files give the classes; numbers if they give none."""
    try:
        described = json.loads(schema.metadata[b"huggingface"])["info"]["features"][label]["names"]
        known = [str(name) for name in described[: bounded.MOST_CLASSES]]
    except (TypeError, KeyError, ValueError, RecursionError):
        known = []
    return tuple(known + [str(number) for number in range(len(known), int(labels.max()) + 1)])
