"""Photographs in tar files of the WebDataset layout, read as a stream: D/train-*.tar and D/test-*.tar (or val-*).

A sample is a run of members whose names are equal up to the first dot: 0017.jpg, and 0017.cls with the number of the
class if the set has labels. Other members are ignored.
"""

import functools
import itertools
import pathlib
import tarfile
from collections.abc import Mapping
from typing import Any

import grain
import numpy as np

from jepa_jax.base.errors import DataLost, UserError
from jepa_jax.base.files import user_path
from jepa_jax.config.augment import Crops
from jepa_jax.config.groups import DataConfig
from jepa_jax.data.contract import Source
from jepa_jax.data.elements import Kind, StreamSource, window_shuffled
from jepa_jax.data.in_memory import numbered_classes
from jepa_jax.data.photos.source import PhotoSource
from jepa_jax.data.readers import bounded
from jepa_jax.data.readers.bounded import check_file_bytes, open_regular
from jepa_jax.data.readers.folder import EXTENSIONS, SPLIT_FOLDERS

SHARDS_AT_ONCE = 4  # whose samples alternate
WINDOW = 1000  # samples that are shuffled among each other by default

Sample = tuple[str, bytes, int]  # place, content of the image file and label; -1 without


def open_webdataset(data: DataConfig, split: str) -> StreamSource:
    """Opens a split; `data.num_train` samples are an epoch, and these and the test split are kept in memory."""
    root = user_path(data.dir, "config.data.dir")
    files = [file for name in SPLIT_FOLDERS[split] for file in sorted(root.glob(f"{name}-*.tar"))] if data.dir else []
    if not files:
        raise UserError(f"config.data.dir = {data.dir!r}: no {SPLIT_FOLDERS[split][0]}-*.tar there")
    if split == "train" and not data.num_train:
        raise UserError("config.data.num_train = 0: tar files have no length; say how many samples count as an epoch")
    if not any(True for file in files for _ in itertools.islice(TarSamples(str(file)), 1)):
        raise UserError(
            f"config.data.dir = {data.dir!r}: no images in {files[0].name} and the like; known are "
            f"{', '.join(sorted(EXTENSIONS))}"
        )
    shards = grain.MapDataset.source([str(file) for file in files])
    if split == "train":
        shards = shards.shuffle(seed=data.seed % 2**32).repeat()
    stream: Any = grain.experimental.InterleaveIterDataset(
        shards.map(TarSamples), cycle_length=min(SHARDS_AT_ONCE, len(files))
    )
    if split == "train":
        stream = window_shuffled(stream, WINDOW if data.shuffle_window < 0 else data.shuffle_window, data.seed)
    count = (data.num_train if split == "train" else data.num_test) or None
    source = PhotoStream(stream, functools.partial(SampledPhotos, data), count)
    if split == "train" and len({source.name_of(index) for index in range(len(source))}) < len(source):
        stored = sum(1 for file in files for _ in TarSamples(str(file)))  # a train stream begins again without a word
        if stored < len(source):
            raise UserError(f"config.data.num_train = {count}: the tar files hold {stored} images; use at most that")
    return source


class PhotoStream(StreamSource):
    """A stream of photographs, out of which a loader can cut crops."""

    _head: Any  # SampledPhotos

    def name_of(self, index: int) -> str:
        return self._head.name_of(index)

    def cropped(self, crops: Mapping[str, Crops], seed: int, epoch: int) -> Source:
        return self._head.cropped(crops, seed, epoch)


class SampledPhotos(PhotoSource):
    fix = "write the shard again, or set data.on_error = skip"
    threaded = True  # a stream has one worker at most

    def __init__(self, data: DataConfig, samples: list[Sample], kind: Kind | None = None):
        self._samples = samples
        labels = np.array([label for _, _, label in samples], np.int32)
        super().__init__(data, labelled=bool((labels >= 0).all()) if kind is None else "label" in kind.spec)
        if "label" in self.spec:
            self.labels = labels
            self.classes = kind.classes if kind else numbered_classes(labels.max())
            outside = (labels < 0) | (labels >= len(self.classes))
            if outside.any():
                place, _, label = samples[int(np.argmax(outside))]
                raise UserError(
                    f"{place}: label {label} (-1: it has no .cls) is not one of the {len(self.classes)} classes of the "
                    "first config.data.num_train samples: raise it, or shuffle the shards"
                )

    def __len__(self) -> int:
        return len(self._samples)

    def name_of(self, index: int) -> str:
        return self._samples[index][0]

    def content(self, index: int) -> bytes:
        return self._samples[index][1]


class TarSamples(grain.IterDataset):
    def __init__(self, file: str):
        super().__init__()
        self._file = file

    def __iter__(self) -> "TarIterator":
        return TarIterator(self._file)


class TarIterator(grain.DatasetIterator):
    """Reads samples from an offset on, which is its whole state."""

    def __init__(self, file: str):
        super().__init__()
        self._file, self._offset = file, 0
        self._tar: Any = None  # the opened file
        self._member: tarfile.TarInfo | None = None

    def __next__(self) -> Sample:
        try:
            return self._next()
        except (tarfile.TarError, ValueError, OSError) as error:
            raise DataLost(f"{self._file}: damaged at byte {self._offset} ({error}); copy it again") from error

    def _next(self) -> Sample:
        if self._tar is None:
            stream = open_regular(pathlib.Path(self._file))
            stream.seek(self._offset)
            self._tar = tarfile.open(fileobj=stream, mode="r:")
            self._member = self._tar.next()  # the first one of the next sample
        while self._member is not None:
            name, parts = _name(self._member), {}
            while self._member is not None and _name(self._member) == name:
                check_file_bytes(self._member.size)  # also of a sparse member, which has no bytes
                content = self._tar.extractfile(self._member)
                parts[self._member.name.rpartition(".")[2].lower()] = content.read() if content else b""
                self._member = self._tar.next()
                self._tar.members = []  # it would keep all of them
            self._offset = self._tar.offset if self._member is None else self._member.offset
            if images := [content for ending, content in parts.items() if f".{ending}" in EXTENSIONS]:
                label = int(parts.get("cls", -1))
                if not -1 <= label < bounded.MOST_CLASSES:
                    raise ValueError(f"{name}.cls is {label}")
                return f"{self._file}, {name}", images[0], label
        self._tar.fileobj.seek(self._offset)
        if self._tar.fileobj.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
            raise tarfile.ReadError("no end of the archive")  # tarfile takes a damaged header for the end
        raise StopIteration

    def get_state(self) -> dict[str, Any]:
        return {"offset": self._offset}

    def set_state(self, state: dict[str, Any]) -> None:
        self.close()
        self._closed, self._offset = False, state["offset"]

    def close(self) -> None:
        if getattr(self, "_tar", None) is not None:
            self._tar.fileobj.close()
            self._tar = None
        super().close()


def _name(member: tarfile.TarInfo) -> str:
    folder, slash, base = member.name.rpartition("/")
    return f"{folder}{slash}{base.partition('.')[0]}"
