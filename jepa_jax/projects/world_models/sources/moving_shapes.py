"""`moving_shapes`: one to three shapes that move and bounce, made on the fly; it needs no download.

`noisy_shapes` are the same sequences as of a camera in the dark: little contrast, and noise that differs in each frame.
"""

import functools

import numpy as np

from jepa_jax.base.errors import UserError
from jepa_jax.config.groups import DataConfig
from jepa_jax.data.in_memory import Arrays
from jepa_jax.projects.world_models.sources.bouncing import MovingFigures

KINDS = ("disc", "square", "triangle")
MOST_SHAPES = 3
SIDES = (0.22, 0.34)  # least and greatest side of a shape, as a part of the frame's
DARKEST = 120  # of a shape; the ground is 0
SMALLEST = 16  # pixels per side of a frame
DIM, DARK, NOISE = 0.3, 80, 60  # of noisy shapes: contrast, ground, and standard deviation of the noise per pixel


class MovingShapes(MovingFigures):
    """Sequences of discs, squares and triangles; element i depends on (data.seed, split, i) alone."""

    synthetic = True

    def __init__(self, data: DataConfig, split: str):
        super().__init__(data, split)
        if data.image_size < SMALLEST:
            raise UserError(
                f"config.data.image_size = {data.image_size}: moving_shapes needs {SMALLEST} pixels or more"
            )

    def figures(self, rng: np.random.Generator) -> list[np.ndarray]:
        count = rng.integers(1, MOST_SHAPES + 1)
        low, high = (round(part * self._size) for part in SIDES)
        return [
            (
                shape(KINDS[rng.integers(len(KINDS))], int(rng.integers(low, high + 1))) * rng.integers(DARKEST, 256)
            ).astype(np.uint8)
            for _ in range(count)
        ]


class NoisyShapes(MovingShapes):
    """Moving shapes with little contrast, in noise that is drawn anew for each pixel of each frame."""

    def _element(self, rng: np.random.Generator) -> Arrays:
        element = super()._element(rng)
        clear = element["frames"]
        frames = DARK + DIM * clear + NOISE * rng.standard_normal(clear.shape, np.float32)
        return element | {"frames": np.clip(frames, 0, 255).astype(np.uint8)}


@functools.cache
def shape(kind: str, side: int) -> np.ndarray:
    """Returns how much of each pixel a shape covers [side, side], in 0..1, from 4 x 4 points per pixel."""
    at = (np.arange(4 * side) + 0.5) / (2 * side) - 1  # -1..1
    x, y = at[None], at[:, None]
    inside = {
        "disc": x**2 + y**2 <= 1,
        "square": np.maximum(np.abs(x), np.abs(y)) <= 0.9,
        "triangle": np.abs(x) <= (y + 1) / 2,
    }[kind]
    return inside.reshape(side, 4, side, 4).mean(axis=(1, 3))
