"""`trajectories`: windows of recorded episodes, from files of frames, actions and states.

`data.dir` is a file, or a folder with one file per split named train and test (or val), each .npz or .h5:

  frames    uint8 [N, H, W, C], the frames of all episodes one after the other
  actions   [N, A]; optional: the last one of an episode leads out of it
  states    [N, S]; optional: probes predict them
  ends      int [E], how many frames there are up to the end of each episode, ascending to N; optional: one episode

Of a single file, one episode in ten is a test episode. Every window of `data.max_frames` frames within an episode, one
of every `data.frame_stride`, is an element; the windows of an episode are a group.
"""

import pathlib
from typing import Any

import jax
import numpy as np

from jepa_jax.base.errors import UserError
from jepa_jax.config.groups import DataConfig
from jepa_jax.data.contract import ElementNames
from jepa_jax.data.in_memory import Arrays
from jepa_jax.data.readers.hdf5 import open_hdf5
from jepa_jax.data.readers.npz import read_npz_file
from jepa_jax.data.readers.undivided import drawn_part
from jepa_jax.projects.world_models.sources.cut import CutSequences

ARRAYS = ("frames", "actions", "states")
SPLIT_NAMES = {"train": ("train",), "test": ("test", "val")}
HDF5 = (".h5", ".hdf5")


class Trajectories(CutSequences):
    """Windows of the episodes of one split; workers read the file themselves."""

    element_names = ElementNames("windows", "episodes")

    def __init__(self, data: DataConfig, split: str):
        place = pathlib.Path(data.dir).expanduser()
        self._file = file_of(place, split, data.dir)
        self._stored: Any = None
        self._offsets = data.frame_stride * np.arange(data.max_frames)
        stored = self._open()
        ends = check_arrays(self._file, stored, data)
        starts = np.concatenate([[0], ends[:-1]])
        episodes = np.arange(len(ends)) if place.is_dir() else drawn_part(len(ends), split, self._file)
        last = self._offsets[-1]
        places = [
            (episode, first) for episode in episodes.tolist() for first in range(starts[episode], ends[episode] - last)
        ]
        if not places:
            longest = int(np.max(ends - starts))
            fix = f"no {split} episode is so long (the longest has {longest}); use fewer data.max_frames"
            raise UserError(f"{self._file}: a window spans {last + 1} frames, and {fix}")
        super().__init__(data, split, places)
        self.spec = {
            name: jax.ShapeDtypeStruct(
                (data.max_frames, *stored[name].shape[1:]), np.uint8 if name == "frames" else np.float32
            )
            for name in ARRAYS
            if name in stored
        }
        self.targets = ("states",) if "states" in self.spec else ()

    def batch(self, indices: np.ndarray) -> Arrays:
        stored, at = self._open(), self._places[np.asarray(indices), 1][:, None] + self._offsets
        # One slice per window: HDF5 reads a slice, but not a list of places with repeats.
        step, last = int(self._offsets[1]) if len(self._offsets) > 1 else 1, int(self._offsets[-1])
        return {
            name: np.stack([stored[name][first : first + last + 1 : step] for first in at[:, 0]]).astype(one.dtype)
            for name, one in self.spec.items()
        }

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_stored": None}

    def _open(self) -> Any:
        if self._stored is None:
            is_hdf5 = self._file.suffix in HDF5
            self._stored = open_hdf5(self._file) if is_hdf5 else read_npz_file(self._file)
        return self._stored


def file_of(place: pathlib.Path, split: str, given: str) -> pathlib.Path:
    """Returns the file of a split."""
    if given and place.is_file():
        return place
    names = [f"{name}{suffix}" for name in SPLIT_NAMES[split] for suffix in (".npz", *HDF5)]
    found = [place / name for name in names if given and (place / name).is_file()]
    if not found:
        raise UserError(f"config.data.dir = {given!r}: neither a file nor a folder with {' or '.join(names)}")
    return found[0]


def check_arrays(file: pathlib.Path, stored: Any, data: DataConfig) -> np.ndarray:
    """Returns the ends of the episodes; raises UserError for arrays that are missing or do not fit together."""
    if "frames" not in stored:
        raise UserError(f"{file}: holds {', '.join(stored) or 'nothing'}; add an array named frames")
    frames, size, channels = stored["frames"], data.image_size, data.channels
    if frames.dtype != np.uint8 or frames.shape[1:] != (size, size, channels):
        wanted = f"uint8 [N, {size}, {size}, {channels}]"
        fix = "set data.image_size and data.channels, or store square uint8 frames"
        raise UserError(f"{file}: frames are {frames.dtype} {list(frames.shape)}, expected {wanted}; {fix}")
    for name in ("actions", "states"):
        if name in stored and (stored[name].ndim != 2 or len(stored[name]) != len(frames)):
            raise UserError(
                f"{file}: {name} are {list(stored[name].shape)}, expected one row for each of {len(frames)} frames"
            )
    ends = np.asarray(stored["ends"][:] if "ends" in stored else [len(frames)])
    if (
        ends.ndim != 1
        or ends.dtype.kind not in "iu"
        or (np.diff(ends, prepend=0) <= 0).any()
        or ends[-1] != len(frames)
    ):
        raise UserError(f"{file}: ends must be ascending integers, the last one {len(frames)}, the number of frames")
    return ends.astype(np.int64)
