"""`moving_mnist`: the published file of moving digits, or digits of an idx set that move alike.

`data.dir` is `mnist_test_seq.npy` (uint8 [20, 10000, 64, 64], frames first), or a folder with the four files of an
MNIST set, whose digits are drawn on the fly.
"""

import pathlib

import cv2
import numpy as np

from jepa_jax.base.errors import UserError
from jepa_jax.config.groups import DataConfig
from jepa_jax.data.contract import ElementNames, Grouped, Source, Spec, target_names
from jepa_jax.data.in_memory import Arrays
from jepa_jax.data.readers.idx import read_idx
from jepa_jax.projects.world_models.sources.bouncing import MovingFigures, detection_map, sequence_spec
from jepa_jax.projects.world_models.sources.cut import CutSequences

ORDER_SEED = 2025  # of the published division, by NumPy's legacy generator
TEST_SHARE = 10  # one sequence in so many is a test sequence
DIGITS = 2  # per sequence
DIGIT_SIZE = 28


class MovingMnist:
    """A split of `data.dir`, a .npy file or a folder of digits."""

    classes = ()
    element_names = ElementNames("sequences", "recordings")

    def __init__(self, data: DataConfig, split: str):
        place = pathlib.Path(data.dir).expanduser()
        if not data.dir or not place.exists():
            fix = "give mnist_test_seq.npy, or a folder with the files of MNIST"
            raise UserError(f"config.data.dir = {data.dir!r}: no such file or folder; {fix}")
        self._source: Source = MovingDigits(data, split) if place.is_dir() else StoredSequences(data, split, place)
        self.spec, self.targets = self._source.spec, target_names(self._source)

    @staticmethod
    def expected_specs(data: DataConfig) -> list[Spec]:
        """See `jepa_jax.data.contract.ExpectsSpecs`."""
        return [sequence_spec(data.max_frames, data.image_size)]

    def __len__(self) -> int:
        return len(self._source)

    @property
    def groups(self) -> np.ndarray:
        return self._source.groups if isinstance(self._source, Grouped) else np.arange(len(self))

    def batch(self, indices: np.ndarray) -> Arrays:
        return self._source.batch(indices)


class MovingDigits(MovingFigures):
    """Two digits of the split's own images per sequence; element i depends on (data.seed, split, i) alone."""

    def __init__(self, data: DataConfig, split: str):
        super().__init__(data, split)
        if data.image_size <= DIGIT_SIZE:
            raise UserError(f"config.data.image_size = {data.image_size}: digits need more than {DIGIT_SIZE} to move")
        self._data, self._split = data, split
        self._images = read_digits(data, split)

    def figures(self, rng: np.random.Generator) -> list[np.ndarray]:
        return [self._images[i] for i in rng.integers(len(self._images), size=DIGITS)]

    def __getstate__(self) -> dict:
        return {name: value for name, value in vars(self).items() if name != "_images"}

    def __setstate__(self, state: dict) -> None:
        vars(self).update(state)
        self._images = read_digits(self._data, self._split)


def read_digits(data: DataConfig, split: str) -> np.ndarray:
    """Returns the images of a split, uint8 [N, 28, 28], without the padding of `data.image_size`."""
    edge = (data.image_size - DIGIT_SIZE) // 2
    return read_idx(data, split)["image"][:, edge : edge + DIGIT_SIZE, edge : edge + DIGIT_SIZE, 0]


class StoredSequences(CutSequences):
    """Parts of `data.max_frames` frames of the published sequences; the parts of one sequence are a group.

    The first tenth of the published permutation is the test split. Pixels are not normalised. The detection map marks
    the centres of the bounding boxes of outer contours, at a threshold half-way between a frame's least and most.
    """

    def __init__(self, data: DataConfig, split: str, file: pathlib.Path):
        self._file, self._frames = file, data.max_frames
        stored = self._open()
        size = data.image_size
        if stored.ndim != 4 or stored.dtype != np.uint8 or stored.shape[2:] != (size, size):
            wanted = f"uint8 [frames, sequences, {size}, {size}]"
            raise UserError(
                f"{file}: holds {stored.dtype} {list(stored.shape)}, expected {wanted}; set data.image_size"
            )
        frames, count = stored.shape[:2]
        if self._frames > frames or count < 2:
            raise UserError(
                f"{file}: holds {count} sequences of {frames} frames; set data.max_frames to {frames} or less"
            )
        order = np.random.RandomState(ORDER_SEED).permutation(count)
        test = max(1, count // TEST_SHARE)
        own, parts = order[:test] if split == "test" else order[test:], frames // self._frames
        places = [(sequence, self._frames * part) for sequence in own for part in range(parts)]
        super().__init__(data, split, places)
        self.spec = sequence_spec(self._frames, size)

    def _open(self) -> np.ndarray:
        try:
            return np.load(self._file, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise UserError(f"{self._file}: not a readable .npy file ({error}); download it again") from error

    def batch(self, indices: np.ndarray) -> Arrays:
        stored = self._open()
        read = [stored[first : first + self._frames, sequence] for sequence, first in self._places[indices]]
        frames = np.stack(read)
        maps = [[detected(frame) for frame in sequence] for sequence in frames]
        return {"frames": frames[..., None], "detections": np.array(maps)}


def detected(frame: np.ndarray) -> np.ndarray:
    """Returns the cells [8, 8] that hold the centre of a bounding box of an outer contour."""
    low, high = int(frame.min()), int(frame.max())
    mask = (frame > (low + high) / 2).astype(np.uint8)
    contours, _ = cv2.findContours(mask, cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_SIMPLE)
    boxes = [cv2.boundingRect(contour) for contour in contours]
    centres = np.array([(x + (width - 1) / 2, y + (height - 1) / 2) for x, y, width, height in boxes]).reshape(1, -1, 2)
    return detection_map(centres, len(frame))[0]
