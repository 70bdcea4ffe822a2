"""Whitening filters: the principal directions of training patches, scaled to equal variance.

They are computed from a sample of images, need no label and are not trained.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jepa_jax.models.kernels.conv import conv2d
from jepa_jax.models.pooling import area_means
from jepa_jax.models.tokens import patchify

RIDGE = 0.1  # of the mean eigenvalue, added to each: keeps noise directions from being blown up
SAMPLED_PATCHES = 32  # per image
QUADRANTS = 2  # per side of a patch
STANDARDISED_IMAGES = 64  # of the sample, from which the scale of whitened patches is taken


class Fixed(nnx.Variable):
    """An array of the model that is neither trained nor a running statistic."""


def whitening_filters(images: Float[Array, "n h w c"], size: int, count: int) -> Float[Array, "size size c count"]:
    """Returns the `count` leading principal directions of patches of normalised images."""
    channels = images.shape[-1]
    corners = _patch_corners(images.shape[1], images.shape[2], size)
    patches = jnp.concatenate([images[:, y : y + size, x : x + size] for y, x in corners])
    patches = patches.reshape(-1, size * size * channels)
    covariance = jnp.cov(patches, rowvar=False)
    variances, directions = jnp.linalg.eigh(covariance)
    scale = jax.lax.rsqrt(variances + RIDGE * jnp.mean(variances))
    leading = (directions * scale)[:, ::-1][:, :count]
    return leading.reshape(size, size, channels, count)


def _patch_corners(height: int, width: int, size: int) -> list[tuple[int, int]]:
    """Returns corners that are spread evenly over the image."""
    side = int(SAMPLED_PATCHES**0.5)
    return [
        (round(y * (height - size) / (side - 1)), round(x * (width - size) / (side - 1)))
        for y in range(side)
        for x in range(side)
    ]


class WhitenedPatches(nnx.Module):
    """Describes each patch by itself: ReLU of both signs of its whitening filters, averaged over its quadrants.

    A linear map of pixels tells little more of a patch than its mean colour and slope. These numbers tell its texture,
    with nothing to train and no pixel of another patch. They are standardised over the sample: rectified numbers are
    never negative, and the tokens of all patches would share a large constant part.
    """

    def __init__(self, sample: Float[Array, "n h w c"], *, patch_size: int, filter_size: int, filters: int, dtype: Any):
        self.patch_size, self.channels, self.dtype = patch_size, sample.shape[-1], dtype
        self.filters = Fixed(whitening_filters(sample, filter_size, filters))
        self.outputs = 2 * filters * QUADRANTS**2
        height, width = (size // patch_size * patch_size for size in sample.shape[1:3])
        seen = self._rectified(patchify(sample[:STANDARDISED_IMAGES, :height, :width], patch_size))
        self.mean, self.scale = Fixed(jnp.mean(seen, (0, 1))), Fixed(1 / (jnp.std(seen, (0, 1)) + 1e-6))

    def __call__(self, patches: Float[Array, "b n pixels"]) -> Float[Array, "b n f"]:
        return ((self._rectified(patches) - self.mean[...]) * self.scale[...]).astype(self.dtype)

    def _rectified(self, patches: Float[Array, "b n pixels"]) -> Float[Array, "b n f"]:
        batch, length, _ = patches.shape
        small = patches.reshape(batch * length, self.patch_size, self.patch_size, self.channels).astype(self.dtype)
        x = conv2d(small, self.filters[...].astype(self.dtype), padding=0)
        of_signs = [_quadrants(jax.nn.relu(sign * x).astype(jnp.float32)) for sign in (1, -1)]
        return jnp.concatenate(of_signs, axis=-1).reshape(batch, length, self.outputs)


def _quadrants(x: Float[Array, "n h w f"]) -> Float[Array, "n 2 2 f"]:
    """Returns the means of quadrants; of four cells each, as a sum, which on CPUs is four times as fast forward."""
    if x.shape[1:3] != (2 * QUADRANTS, 2 * QUADRANTS):
        return area_means(x, QUADRANTS)
    return (x[:, ::2, ::2] + x[:, ::2, 1::2] + x[:, 1::2, ::2] + x[:, 1::2, 1::2]) / 4
