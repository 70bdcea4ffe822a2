"""Sources whose elements are not images, in a module of their own because worker processes import it."""

import pathlib

import jax
import numpy as np

from jepa_jax.base.errors import UserError
from jepa_jax.data.contract import ElementNames, Spec

FRAMES = (4, 3, 5)  # T, H, W
PER_RECORDING = 4  # sequences of a group


class SequenceSource:
    """Sequences of maps, their lengths, and no labels; counts the batches that this process asked for."""

    classes = ()
    spec = {"frames": jax.ShapeDtypeStruct(FRAMES, np.float32), "length": jax.ShapeDtypeStruct((), np.int32)}

    def __init__(self, data, split):
        self.count, self.calls = data.num_train if split == "train" else data.num_test, 0

    def __len__(self):
        return self.count

    def batch(self, indices):
        self.calls += 1
        frames = np.sin(np.asarray(indices)[:, None] + np.arange(np.prod(FRAMES))).astype(np.float32)
        return {"frames": frames.reshape(-1, *FRAMES), "length": np.asarray(indices, np.int32) % FRAMES[0] + 1}


def padded_spec(size: int, frames: int) -> Spec:
    """Returns the spec of sequences of masks, padded on the left, and of the mask that follows."""
    return {
        "frames": jax.ShapeDtypeStruct((frames, size, size, 1), np.bool_),
        "valid": jax.ShapeDtypeStruct((frames,), np.bool_),
        "target": jax.ShapeDtypeStruct((size, size, 1), np.bool_),
        "recording": jax.ShapeDtypeStruct((), np.int32),
    }


class PaddedSequences:
    """Sequences of 2 to 20 frames in buckets and groups; `data.dir`, if it is given, must be a folder."""

    classes = ()
    element_names = ElementNames("sequences", "recordings")

    @staticmethod
    def expected_specs(data):
        return [padded_spec(data.image_size, frames) for frames in (*data.frame_buckets, data.max_frames)]

    def __init__(self, data, split, frames=0):
        if data.dir and not pathlib.Path(data.dir).is_dir():
            raise UserError(f"config.data.dir = {data.dir!r}: no such folder")
        self._data, self._split, self._frames = data, split, frames or data.max_frames
        self._limits = (*data.frame_buckets, data.max_frames)
        self.spec = padded_spec(data.image_size, self._frames)

    def __len__(self):
        return self._data.num_train if self._split == "train" else self._data.num_test

    @property
    def groups(self):
        return np.arange(len(self)) // PER_RECORDING

    @property
    def buckets(self):
        return np.searchsorted(self._limits, self._lengths(np.arange(len(self))))

    def in_bucket(self, bucket):
        return PaddedSequences(self._data, self._split, self._limits[bucket])

    def _lengths(self, indices):
        return np.minimum(2 + 7 * indices % 19, self._data.max_frames)

    def batch(self, indices):
        indices, size = np.asarray(indices), self._data.image_size
        shape = (self._data.max_frames + 1, size, size, 1)
        drawn = np.stack([np.random.default_rng([i, len(self._split)]).random(shape) < 0.2 for i in indices])
        valid = np.arange(self._frames) >= self._frames - self._lengths(indices)[:, None]
        return {
            "frames": drawn[:, -self._frames - 1 : -1] & valid[..., None, None, None],
            "valid": valid,
            "target": drawn[:, -1],
            "recording": (indices // PER_RECORDING).astype(np.int32),
        }
