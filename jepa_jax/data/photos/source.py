"""Base class of sources of photographs: each is read, decoded and cropped when a batch asks for it."""

import collections
import functools
import multiprocessing
import os
import threading
from collections.abc import Callable, Mapping
from multiprocessing.pool import ThreadPool
from typing import Any

import numpy as np

from jepa_jax.base.errors import UserError
from jepa_jax.config.augment import Crops
from jepa_jax.config.groups import DataConfig
from jepa_jax.data.contract import Spec, image_spec
from jepa_jax.data.photos.crops import centre_crop, cropped_spec, random_crops
from jepa_jax.data.photos.decode import Photo
from jepa_jax.data.reading import reading

Element = dict[str, np.ndarray]
Make = Callable[[Photo, int], Element]  # what becomes of a photograph and its index


class PhotoSource:
    """Lazily decoded images: centre crops of `data.image_size`, or random crops (`cropped`).

    A subclass sets `classes` and `labels`, and defines `__len__`, `name_of` and `content`.
    """

    classes: tuple[str, ...] = ()
    labels: np.ndarray | None = None
    fix = "remove the file, or set data.on_error = skip"  # of an image that cannot be read
    threaded = False  # whether threads decode in a worker process too

    def __init__(self, data: DataConfig, *, labelled: bool):
        self._on_error, self._shorter_side = data.on_error, data.shorter_side
        self.spec: Spec = image_spec(data.image_size, data.channels, labelled=labelled)

    def __len__(self) -> int:
        raise NotImplementedError

    def name_of(self, index: int) -> str:
        """Returns what messages call an image."""
        raise NotImplementedError

    def content(self, index: int) -> bytes:
        raise NotImplementedError

    def labels_of(self, indices: np.ndarray) -> np.ndarray:
        """Returns the labels of images that have just been read."""
        assert self.labels is not None  # or a subclass overrides this
        return self.labels[indices]

    def batch(self, indices: np.ndarray) -> dict[str, Any]:
        size = self.spec["image"].shape[0]
        return self.elements(indices, lambda photo, _: {"image": centre_crop(photo, size, self._shorter_side)})

    def cropped(self, crops: Mapping[str, Crops], seed: int, epoch: int) -> "CroppedPhotos":
        return CroppedPhotos(self, crops, seed, epoch)

    def elements(self, indices: np.ndarray, make: Make) -> dict[str, Any]:
        """Returns what `make` makes of photographs, with labels and the names of those that were skipped."""

        def one(index: int) -> tuple[Element, int, list[str]]:
            return self._readable(int(index), make)

        if self.threaded or multiprocessing.parent_process() is None:  # decoding releases the interpreter lock
            made = decoders().map(one, indices, chunksize=1)
        else:  # one of several worker processes: they are the parallelism
            made = list(map(one, indices))
        parts, used, skipped = zip(*made, strict=True)
        batch: dict[str, Any] = {name: np.stack([part[name] for part in parts]) for name in parts[0]}
        if "label" in self.spec:
            batch["label"] = self.labels_of(np.array(used))
        return batch | {"skipped": [name for names in skipped for name in names]}

    def _readable(self, index: int, make: Make) -> tuple[Element, int, list[str]]:
        """Returns the element at `index` or, when skipping, of the next readable image, its index, and names skipped.

        Randomness is that of `index`, whichever image stands in.
        """
        skipped: list[str] = []
        channels = self.spec["image"].shape[-1]
        for candidate in range(index, index + len(self)):
            candidate %= len(self)
            try:
                with reading(functools.partial(self.name_of, candidate)):
                    return make(Photo(self.content(candidate), channels), index), candidate, skipped
            except UserError:
                raise
            except Exception as error:  # image libraries raise nearly anything on damaged files
                name = self.name_of(candidate)
                if self._on_error == "refuse":
                    raise UserError(
                        f"{name}: cannot be read as an image ({type(error).__name__}: {error}); {self.fix}"
                    ) from error
                skipped.append(name)
        name = self.name_of(index)
        raise UserError(f"{name}: neither this nor any other of {len(self)} images can be read; check them")


@functools.cache
def decoders() -> ThreadPool:
    """Returns the threads of this process that decode; unlike those of an executor, one that hangs holds up no exit."""
    return ThreadPool(os.cpu_count())


class PackedPhotos(PhotoSource):
    """Photographs that are stored many to a file or row group, which are opened on first use, in each process.

    A subclass sets `_ends`, the number of images up to the end of each pack, and `_chosen`, those of the split.
    """

    _ends: np.ndarray
    _chosen: np.ndarray

    def __init__(self, data: DataConfig, *, labelled: bool):
        super().__init__(data, labelled=labelled)
        self._close()

    def __len__(self) -> int:
        return len(self._chosen)

    def _place(self, index: int) -> tuple[int, int]:
        """Returns the number of the pack of an image, and the image's number in it."""
        number = int(self._chosen[index])
        pack = int(np.searchsorted(self._ends, number, side="right"))
        return pack, number - (int(self._ends[pack - 1]) if pack else 0)

    def _close(self) -> None:
        self._open: collections.OrderedDict[int, Any] = collections.OrderedDict()
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key not in ("_open", "_lock")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._close()


class CroppedPhotos:
    """Random crops of the photographs of a source; those of an image depend on (seed, epoch, index) alone."""

    def __init__(self, source: PhotoSource, crops: Mapping[str, Crops], seed: int, epoch: int):
        self._source, self._crops, self._seed, self._epoch = source, crops, seed, epoch
        self.classes, self.labels = source.classes, source.labels
        self.spec = cropped_spec(source.spec, crops)

    def __len__(self) -> int:
        return len(self._source)

    def batch(self, indices: np.ndarray) -> dict[str, Any]:
        def make(photo: Photo, index: int) -> Element:
            return random_crops(photo, self._crops, np.random.default_rng([self._seed % 2**63, self._epoch, index]))

        return self._source.elements(indices, make)
