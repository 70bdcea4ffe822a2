"""A perceptron that reads all pixels of a frame: for small ones on a CPU, at a tenth of the cost of convolutions."""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jepa_jax.config.groups import EncoderGroup
from jepa_jax.config.schema import key
from jepa_jax.models.kernels.linear import linear
from jepa_jax.models.kernels.norm import BatchNorm, BatchNormConfig


@dataclasses.dataclass(frozen=True)
class FrameMlpConfig(BatchNormConfig, EncoderGroup):
    widths: tuple[int, ...] = key((256, 256), "numbers of each layer", least=1, nonempty=True)
    strips: int = key(
        0, "numbers that each row and each column of each channel is mapped to before these layers; 0 = none", least=0
    )


class FrameMlp(nnx.Module):
    """Maps all pixels of an image through dense layers with ReLU.

    With `strips`, these read rows and columns instead, as one layer maps them that all rows share, and one that all
    columns share. Its weights begin nearly equal: a strip begins as how much there is in it. By how much strips differ
    from their mean is summed up from the first to the last, so that a dot or a wall a little further along changes the
    numbers a little. Batch norm then makes a gap in a wall count as much as a wall or a dot.
    """

    Keys = FrameMlpConfig

    def __init__(
        self,
        size: int,
        channels: int,
        widths: tuple[int, ...],
        *,
        strips: int = 0,
        dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        self.strips = nnx.List([linear(size, strips, dtype, rngs) for _ in range(2 if strips else 0)])
        for layer in self.strips:
            layer.kernel[...] = 0.3 * layer.kernel[...] + size**-0.5
        inputs = 2 * size * channels * strips if strips else size**2 * channels
        if strips:
            self.norm = BatchNorm(inputs, dtype=dtype, rngs=rngs)
        self.layers = nnx.List([linear(i, o, dtype, rngs) for i, o in itertools.pairwise((inputs, *widths))])
        self.feature_dim = widths[-1]

    @classmethod
    def from_config(
        cls, config: Any, sample: Float[Array, "n h w c"], *, view_size: int, dtype: Any, remat: str, rngs: nnx.Rngs
    ) -> "FrameMlp":
        """See `jepa_jax.models.registry.Encoder`."""
        del remat  # there is little to keep
        return cls(view_size, sample.shape[-1], config.widths, strips=config.strips, dtype=dtype, rngs=rngs)

    def __call__(self, images: Float[Array, "b h w c"], *, train: bool = False) -> Float[Array, "b f"]:
        x = images.reshape(images.shape[0], -1)
        if self.strips:
            rows, columns = jnp.swapaxes(images, 2, 3), jnp.transpose(images, (0, 2, 3, 1))  # [b, strip, c, along]
            seen = [layer(way) for layer, way in zip(self.strips, (rows, columns), strict=True)]
            sums = [jnp.cumsum(one - jnp.mean(one, axis=1, keepdims=True), axis=1) for one in seen]
            x = jnp.concatenate(sums, axis=1).reshape(images.shape[0], -1)
            x = jnp.tanh(self.norm(x, train=train))
        for layer in self.layers:
            x = jax.nn.relu(layer(x))
        return x
