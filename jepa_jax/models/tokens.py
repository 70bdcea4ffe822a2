"""Patches of images, and tokens of sequences."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Integer

PATCH_EPS = 1e-6  # of a patch's variance, where patches are normalised
Patches = Float[Array, "b n numbers"]


def take_tokens(x: Float[Array, "b t d"], index: Integer[Array, "b n"]) -> Float[Array, "b n d"]:
    """Returns the tokens of each sequence at `index`."""
    return jnp.take_along_axis(x, index[..., None], axis=1)


def patchify(images: Float[Array, "b h w c"], size: int) -> Float[Array, "b patches numbers"]:
    """Returns patches row by row, each as size * size * C numbers."""
    batch, height, width, channels = images.shape
    if height % size or width % size:
        raise ValueError(f"images of {height} x {width} pixels: patch_size = {size} does not divide them")
    x = images.reshape(batch, height // size, size, width // size, size, channels)
    return x.transpose(0, 1, 3, 2, 4, 5).reshape(batch, -1, size * size * channels)


def unpatchify(patches: Float[Array, "b patches numbers"], size: int) -> Float[Array, "b h w c"]:
    """Inverts `patchify` for square images."""
    batch, tokens, numbers = patches.shape
    grid, channels = round(tokens**0.5), numbers // size**2
    x = patches.reshape(batch, grid, grid, size, size, channels)
    return x.transpose(0, 1, 3, 2, 4, 5).reshape(batch, grid * size, grid * size, channels)


def patch_statistics(patches: Patches) -> tuple[Float[Array, "b n 1"], Float[Array, "b n 1"]]:
    """Returns mean and standard deviation of each patch's pixels."""
    mean = jnp.mean(patches, axis=-1, keepdims=True)
    return mean, jnp.sqrt(jnp.var(patches, axis=-1, keepdims=True, ddof=1) + PATCH_EPS)
