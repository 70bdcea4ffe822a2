"""PatchNet: whitened patches, then a few learned convolutions; an encoder that a CPU can train.

The stem's filters are the leading principal directions of training patches, scaled to equal variance. They are computed
from a sample of images, need no label and are not trained: gradients never pay for the largest maps of the network.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from jepa_jax.models.conv import conv2d, max_pool
from jepa_jax.models.norm import BatchNorm
from jepa_jax.models.resnet import ConvNorm

RIDGE = 0.1  # of the mean eigenvalue, added to each: keeps noise directions from being blown up
SAMPLED_PATCHES = 32  # an image


class Fixed(nnx.Variable):
    """An array of the model that is neither trained nor a running statistic."""


def whitening_filters(images: jax.Array, size: int, count: int) -> jax.Array:
    """[size, size, 3, count]: the `count` leading principal directions of patches of normalised images [N, H, W, 3]."""
    corners = _patch_corners(images.shape[1], images.shape[2], size)
    patches = jnp.concatenate([images[:, y : y + size, x : x + size] for y, x in corners])
    patches = patches.reshape(-1, size * size * 3)
    covariance = jnp.cov(patches, rowvar=False)
    variances, directions = jnp.linalg.eigh(covariance)
    scale = jax.lax.rsqrt(variances + RIDGE * jnp.mean(variances))
    leading = (directions * scale)[:, ::-1][:, :count]
    return leading.reshape(size, size, 3, count)


def _patch_corners(height: int, width: int, size: int) -> list[tuple[int, int]]:
    """A fixed, even spread of corners over the image."""
    side = int(SAMPLED_PATCHES**0.5)
    return [
        (round(y * (height - size) / (side - 1)), round(x * (width - size) / (side - 1)))
        for y in range(side)
        for x in range(side)
    ]


class PatchNet(nnx.Module):
    """Images [B, H, W, 3] -> features [B, widths[-1]]: stem, 3x3, pool, 3x3 ..., 1x1, mean over the map."""

    def __init__(
        self,
        sample: jax.Array,
        *,
        patch_size: int,
        stride: int,
        stem_width: int,
        widths: Sequence[int],
        dtype=jnp.float32,
        remat: bool = False,
        rngs: nnx.Rngs,
    ):
        del remat  # a few layers: nothing to gain
        self.stride, self.padding, self.dtype = stride, (patch_size - stride) // 2, dtype
        self.filters = Fixed(whitening_filters(sample, patch_size, stem_width))
        self.stem_norm = BatchNorm(stem_width, dtype=dtype, rngs=rngs)
        sizes = [stem_width, *widths]
        last = len(widths) - 1
        self.layers = nnx.List([
            ConvNorm(inputs, outputs, 1 if i == last else 3, dtype=dtype, rngs=rngs)
            for i, (inputs, outputs) in enumerate(zip(sizes[:-1], sizes[1:], strict=True))
        ])  # fmt: skip
        self.feature_dim = widths[-1]

    def __call__(self, images: jax.Array, *, train: bool = False) -> jax.Array:
        filters = self.filters[...].astype(self.dtype)
        x = conv2d(images.astype(self.dtype), filters, stride=self.stride, padding=self.padding)
        x = jax.nn.relu(self.stem_norm(x, train=train))
        for i, layer in enumerate(self.layers):
            x = layer(x, train)
            if i == 0:
                x = max_pool(x, window=2, stride=2)
        return jnp.mean(x.astype(jnp.float32), axis=(1, 2))
