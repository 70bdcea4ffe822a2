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


@dataclasses.dataclass(frozen=True)
class FrameMlpConfig(EncoderGroup):
    widths: tuple[int, ...] = key((256, 256), "numbers of each layer", least=1, nonempty=True)


class FrameMlp(nnx.Module):
    """Maps all pixels of an image through dense layers with ReLU."""

    Keys = FrameMlpConfig

    def __init__(self, inputs: int, widths: tuple[int, ...], *, dtype: Any = jnp.float32, rngs: nnx.Rngs):
        self.layers = nnx.List([linear(i, o, dtype, rngs) for i, o in itertools.pairwise((inputs, *widths))])
        self.feature_dim = widths[-1]

    @classmethod
    def from_config(
        cls, config: Any, sample: Float[Array, "n h w c"], *, view_size: int, dtype: Any, remat: str, rngs: nnx.Rngs
    ) -> "FrameMlp":
        """See `jepa_jax.models.registry.Encoder`."""
        del remat  # there is little to keep
        return cls(view_size**2 * sample.shape[-1], config.widths, dtype=dtype, rngs=rngs)

    def __call__(self, images: Float[Array, "b h w c"], *, train: bool = False) -> Float[Array, "b f"]:
        del train  # it has no norms and no dropout
        x = images.reshape(images.shape[0], -1)
        for layer in self.layers:
            x = jax.nn.relu(layer(x))
        return x
