"""What moving shapes and moving digits share: paths that bounce, and elements that are drawn from (seed, split, index).

The rule of the paths is that of Moving MNIST (Srivastava et al., "Unsupervised Learning of Video Representations using
LSTMs", ICML 2015): a figure moves at constant speed in a random direction; a coordinate that leaves the canvas is set
to its border and its velocity is reversed.
"""

import abc

import jax
import numpy as np

from jepa_jax.base.errors import UserError
from jepa_jax.config.groups import DataConfig
from jepa_jax.data.contract import ElementNames
from jepa_jax.data.in_memory import Arrays
from jepa_jax.data.synthetic import SPLIT_STREAMS, drawn_count

SPEED = 0.1  # of the way that a figure can go, per frame
CELLS = 8  # of the detection map, per side


class MovingFigures(abc.ABC):
    """Sequences of figures on black; subclasses draw them.

    An element has `frames`, `states` [T, 2], the mean centre of the figures (x, y) in pixels, and `detections`
    [T, 8, 8], the cells that hold the centre of a figure. Probes predict `states`.
    """

    classes = ()
    targets = ("states",)
    element_names = ElementNames("sequences")

    def __init__(self, data: DataConfig, split: str):
        self._count = drawn_count(data, split)
        if data.channels != 1:
            raise UserError(f"config.data.channels = {data.channels}: {data.source} is grey; set data.channels = 1")
        if data.max_frames < 3:
            raise UserError(f"config.data.max_frames = {data.max_frames}: a prediction needs 3 frames at least")
        self._size, self._frames = data.image_size, data.max_frames
        self._stream = [data.seed, SPLIT_STREAMS[split]]
        self.spec = sequence_spec(self._frames, self._size) | {
            "states": jax.ShapeDtypeStruct((self._frames, 2), np.float32)
        }

    def __len__(self) -> int:
        return self._count

    def batch(self, indices: np.ndarray) -> Arrays:
        drawn = [self._element(np.random.default_rng([*self._stream, int(index)])) for index in indices]
        return {name: np.stack([element[name] for element in drawn]) for name in self.spec}

    def _element(self, rng: np.random.Generator) -> Arrays:
        figures = self.figures(rng)
        canvas, centres = np.zeros((self._frames, self._size, self._size), np.uint8), []
        for figure in figures:
            corners = bounce(rng, self._frames, self._size - len(figure))  # [T, 2], whole pixels
            for frame, (x, y) in zip(canvas, corners, strict=True):
                window = frame[y : y + len(figure), x : x + len(figure)]
                np.maximum(window, figure, out=window)
            centres.append(corners + (len(figure) - 1) / 2)
        places = np.stack(centres, axis=1)  # [T, figures, 2]
        return {
            "frames": canvas[..., None],
            "states": places.mean(axis=1).astype(np.float32),
            "detections": detection_map(places, self._size),
        }

    @abc.abstractmethod
    def figures(self, rng: np.random.Generator) -> list[np.ndarray]:
        """Returns the figures of a sequence, uint8 squares of any size."""


def sequence_spec(frames: int, size: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the spec of grey frames and of their detection maps."""
    return {
        "frames": jax.ShapeDtypeStruct((frames, size, size, 1), np.uint8),
        "detections": jax.ShapeDtypeStruct((frames, CELLS, CELLS), np.bool_),
    }


def bounce(rng: np.random.Generator, frames: int, way: int) -> np.ndarray:
    """Returns the upper left corners (x, y) of a figure [frames, 2] that can go `way` pixels along each axis."""
    angle, place = 2 * np.pi * rng.random(), rng.random(2)
    velocity, places = SPEED * np.array([np.cos(angle), np.sin(angle)]), np.empty((frames, 2))
    for t in range(frames):
        places[t] = place
        place = place + velocity
        outside = (place < 0) | (place > 1)
        place, velocity = np.clip(place, 0, 1), np.where(outside, -velocity, velocity)
    return np.round(way * places).astype(int)


def detection_map(places: np.ndarray, size: int) -> np.ndarray:
    """Returns the cells [T, 8, 8] that hold one of the places (x, y) [T, figures, 2]."""
    cells = np.minimum((places + 0.5) * CELLS / size, CELLS - 1).astype(int)
    found = np.zeros((len(places), CELLS, CELLS), np.bool_)
    found[np.arange(len(places))[:, None], cells[..., 1], cells[..., 0]] = True
    return found
