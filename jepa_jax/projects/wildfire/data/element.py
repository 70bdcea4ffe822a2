"""One element of every data set of fires: a history of masks, padded on the left, and the mask that follows it."""

import jax
import numpy as np

from jepa_jax.config.groups import DataConfig
from jepa_jax.data.contract import Spec
from jepa_jax.data.in_memory import Arrays


def fire_spec(size: int, channels: int, frames: int) -> Spec:
    """Returns the spec of an element; masks are bool.

    `fire` [T, H, W, 1] is the history and `target` [H, W, 1] the mask after its last frame. `valid` [T] is False in
    padding, which comes first. `static` [H, W, C] lies in [0, 1]. `wind` [T, 2] holds speed and direction in [0, 1]:
    the direction that the wind comes from, clockwise from north (the upper edge), as a fraction of the full circle.
    `known` [H, W, 1] is True where pixels count. `fire_id` tells the fires of a split apart.
    """
    square = (size, size, 1)
    return {
        "fire": jax.ShapeDtypeStruct((frames, *square), np.bool_),
        "static": jax.ShapeDtypeStruct((size, size, channels), np.float32),
        "wind": jax.ShapeDtypeStruct((frames, 2), np.float32),
        "valid": jax.ShapeDtypeStruct((frames,), np.bool_),
        "target": jax.ShapeDtypeStruct(square, np.bool_),
        "known": jax.ShapeDtypeStruct(square, np.bool_),
        "fire_id": jax.ShapeDtypeStruct((), np.int32),
    }


def expected_specs(data: DataConfig) -> list[Spec]:
    """Returns what elements of a config are padded to, the longest last, also if its files are not there."""
    return [fire_spec(data.image_size, data.channels, frames) for frames in (*data.frame_buckets, data.max_frames)]


def fire_element(
    fire: np.ndarray,
    wind: np.ndarray,
    static: np.ndarray,
    target: np.ndarray,
    *,
    fire_id: int,
    frames: int,
    known: np.ndarray | None = None,
) -> Arrays:
    """Returns an element whose history is padded with zeros on the left to `frames`.

    Args:
      fire: masks [t, H, W] without padding, t <= frames.
      wind: [t, 2].
      static: [H, W, C].
      target: [H, W].
      fire_id: number of the fire.
      frames: length of the padded history.
      known: [H, W]; None = every pixel counts.
    """
    missing = frames - len(fire)
    return {
        "fire": np.pad(fire.astype(np.bool_), ((missing, 0), (0, 0), (0, 0)))[..., None],
        "static": static.astype(np.float32),
        "wind": np.pad(wind.astype(np.float32), ((missing, 0), (0, 0))),
        "valid": np.arange(frames) >= missing,
        "target": target.astype(np.bool_)[..., None],
        "known": (np.ones(target.shape, np.bool_) if known is None else known.astype(np.bool_))[..., None],
        "fire_id": np.array(fire_id, np.int32),
    }


def stacked(elements: list[Arrays]) -> Arrays:
    """Returns the batch of some elements."""
    return {key: np.stack([element[key] for element in elements]) for key in elements[0]}
