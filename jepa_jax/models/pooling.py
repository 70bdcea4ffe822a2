"""From an encoder's last map or tokens to one vector per image, in float32 whatever the encoder computes in."""

from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

Cells = Float[Array, "b h w d"]


class EncoderOutputs(NamedTuple):
    """What an encoder gives before anything is pooled."""

    cells: Cells  # the last map of a convolutional encoder, or the patches of a ViT
    cls: Float[Array, "b d"] | None = None  # the CLS token of a ViT that has one


@runtime_checkable
class PoolingEncoder(Protocol):
    """An encoder whose outputs can be pooled in several ways."""

    pools: tuple[str, ...]  # values of `eval.pool` that it allows
    pool: str  # the one that `__call__` uses

    def outputs(self, images: Any, *, train: bool = False, normalised: bool = True) -> EncoderOutputs:
        """Returns what is pooled; not `normalised`: before a last layer norm, if there is one."""


def pooled(outputs: EncoderOutputs, kind: str) -> Float[Array, "b f"]:
    """Returns features in float32.

    Args:
      kind: "mean" over all cells; "grid2", the means over the 2 x 2 quadrants, concatenated row by row (a middle row
        or column of an odd map counts half in each of its two quadrants); "cls", the CLS token.
    """
    if kind == "cls":
        assert outputs.cls is not None, "build_encoder checks that there is a CLS token"
        return outputs.cls.astype(jnp.float32)
    cells = outputs.cells.astype(jnp.float32)
    if kind == "mean":
        return jnp.mean(cells, axis=(1, 2))
    return area_means(cells, 2).reshape(cells.shape[0], -1)


def area_means(cells: Cells, side: int) -> Float[Array, "b side side d"]:
    """Returns maps of `side` x `side` cells, each the mean over the area that it covers."""
    batch, height, width, numbers = cells.shape
    if height % side == 0 and width % side == 0:  # several times as fast as products with weights
        return jnp.mean(cells.reshape(batch, side, height // side, side, width // side, numbers), axis=(2, 4))
    rows, columns = (jnp.asarray(area_weights(size, side), cells.dtype) for size in cells.shape[1:3])
    return jnp.einsum("ih,jw,bhwd->bijd", rows, columns, cells)


def area_weights(size: int, new_size: int) -> np.ndarray:
    """Returns which part of each new interval the old ones cover [new_size, size]; 14 to 4 gives intervals of 3.5."""
    old, new = np.arange(size + 1) / size, np.arange(new_size + 1) / new_size
    overlap = np.minimum(new[1:, None], old[None, 1:]) - np.maximum(new[:-1, None], old[None, :-1])
    return np.maximum(overlap, 0).astype(np.float32) * new_size
