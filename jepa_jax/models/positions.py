"""Positions of the patches of a vision transformer, on a grid of any size.

Fixed sines and cosines, learned ones that are interpolated, and rotary ones, which turn queries and keys (DINOv3).
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float


class Rotation(NamedTuple):
    """Rotary positions of patches: by how much attention turns pairs of numbers of queries and keys."""

    cos: Float[Array, "b n per_head"]
    sin: Float[Array, "b n per_head"]


def sincos_positions(grid: int, width: int, new_grid: tuple[int, int] | None = None) -> np.ndarray:
    """Returns fixed positions [rows * columns, width]: sines and cosines of row and column, from 0 to grid - 1.

    With another `new_grid` (rows, columns), the same area has patches of another size, and rows and columns are those
    of their centres.
    """
    frequencies = 1 / 10_000 ** (np.arange(width // 4) / (width // 4))

    def axis(size: int) -> np.ndarray:
        angles = ((np.arange(size) + 0.5) * (grid / size) - 0.5)[:, None] * frequencies  # [size, width / 4]
        return np.concatenate([np.sin(angles), np.cos(angles)], axis=1)  # [size, width / 2]

    rows, columns = new_grid or (grid, grid)
    down, right = np.repeat(axis(rows), columns, axis=0), np.tile(axis(columns), (rows, 1))
    return np.concatenate([down, right], axis=1).astype(np.float32)


def interpolated(
    positions: Float[Array, "1 old d"], rows: int, columns: int, *, antialias: bool = True
) -> Float[Array, "1 new d"]:
    """Returns the positions of a square grid for other patches of the same area: bicubic.

    Not antialiased they are what transformers makes of them: Keys' kernel with a = -3/4, borders repeated.
    """
    _, places, width = positions.shape
    old = math.isqrt(places)
    if (rows, columns) == (old, old):
        return positions
    square = positions.reshape(old, old, width)
    if antialias:
        resized = jax.image.resize(square, (rows, columns, width), "cubic")
    else:
        down, right = (cubic_weights(old, new) for new in (rows, columns))
        resized = jnp.einsum("rR,cC,RCd->rcd", down, right, square, precision=jax.lax.Precision.HIGHEST)
    return resized.reshape(1, rows * columns, width)


def cubic_weights(old: int, new: int, a: float = -0.75) -> np.ndarray:
    """Returns the weights [new, old] of Keys' cubic convolution between centres of cells; the border is repeated."""
    centre = (np.arange(new) + 0.5) * old / new - 0.5
    weights = np.zeros((new, old))
    for offset in range(-1, 3):
        place = np.floor(centre).astype(int) + offset
        far = np.abs(centre - place)
        near = (a + 2) * far**3 - (a + 3) * far**2 + 1
        outside = a * (far**3 - 5 * far**2 + 8 * far - 4)
        np.add.at(weights, (np.arange(new), np.clip(place, 0, old - 1)), np.where(far <= 1, near, outside))
    return weights.astype(np.float32)


def rotary(rows: int, columns: int, per_head: int, base: float) -> tuple[np.ndarray, np.ndarray]:
    """Returns cosines and sines [rows * columns, per_head] of the angles of DINOv3.

    Centres of patches lie in [-1, 1] from edge to edge, whatever their number. A quarter of the numbers of a head has
    the angles 2 pi y / base^(4 i / per_head), the next one those of x, and so has the second half.
    """
    frequencies = 2 * np.pi / base ** (np.arange(per_head // 4) * 4 / per_head)
    y, x = ((np.arange(size) + 0.5) / size * 2 - 1 for size in (rows, columns))
    places = np.stack(np.meshgrid(y, x, indexing="ij"), axis=-1).reshape(-1, 2)
    angles = np.tile((places[:, :, None] * frequencies).reshape(len(places), -1), 2)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def rotated(x: Float[Array, "b n heads per_head"], rotation: Rotation) -> Float[Array, "b n heads per_head"]:
    """Returns queries or keys turned by their positions; the first ones, which belong to no patch, stay."""
    leading, patches = jnp.split(x, [x.shape[1] - rotation.cos.shape[1]], axis=1)
    first, second = jnp.split(patches.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([-second, first], axis=-1)
    cos, sin = (part[:, :, None] for part in rotation)
    return jnp.concatenate([leading, (patches * cos + turned * sin).astype(x.dtype)], axis=1)
