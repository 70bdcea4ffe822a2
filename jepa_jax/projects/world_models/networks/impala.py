"""IMPALA: the small convolutional encoder of reinforcement learning, without norms.

Reference: Espeholt et al., "IMPALA: Scalable Distributed Deep-RL", ICML 2018. Each stack is a convolution, a max-pool
of stride 2 and residual blocks. Unlike a mean over the last map, its flattened cells keep where things are.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jepa_jax.config.groups import EncoderGroup
from jepa_jax.config.schema import key
from jepa_jax.models.kernels.conv import conv2d, max_pool
from jepa_jax.models.remat import rematerialized

Map = Float[Array, "b h w c"]


@dataclasses.dataclass(frozen=True)
class ImpalaConfig(EncoderGroup):
    widths: tuple[int, ...] = key((16, 32, 32), "channels of each stack", least=1, nonempty=True)
    blocks: int = key(2, "residual blocks of each stack", least=0)
    stem_stride: int = key(1, "pixels between two outputs of the first convolution", least=1, most=4)


class Conv(nnx.Module):
    """A 3x3 convolution with bias."""

    def __init__(self, inputs: int, outputs: int, *, stride: int = 1, dtype: Any, rngs: nnx.Rngs):
        self.stride, self.dtype = stride, dtype
        self.kernel = nnx.Param(nnx.initializers.he_normal()(rngs.params(), (3, 3, inputs, outputs)))
        self.bias = nnx.Param(jnp.zeros(outputs))

    def __call__(self, x: Map) -> Map:
        kernel = self.kernel[...].astype(self.dtype)
        return conv2d(x.astype(self.dtype), kernel, stride=self.stride, padding=1) + self.bias[...].astype(self.dtype)


class Stack(nnx.Module):
    """Convolution, max-pool, residual blocks of two convolutions."""

    def __init__(self, inputs: int, width: int, blocks: int, *, stride: int = 1, dtype: Any, rngs: nnx.Rngs):
        self.enter = Conv(inputs, width, stride=stride, dtype=dtype, rngs=rngs)
        self.blocks = nnx.List([
            nnx.List([Conv(width, width, dtype=dtype, rngs=rngs) for _ in range(2)]) for _ in range(blocks)
        ])  # fmt: skip

    def __call__(self, x: Map) -> Map:
        x = max_pool(self.enter(x), window=3, stride=2, padding=1)
        for first, second in self.blocks:
            x = x + second(jax.nn.relu(first(jax.nn.relu(x))))
        return x


class Impala(nnx.Module):
    """Maps images to all numbers of its last map."""

    Keys = ImpalaConfig

    def __init__(
        self,
        size: int,
        channels: int,
        widths: tuple[int, ...],
        *,
        blocks: int,
        stem_stride: int = 1,
        dtype: Any = jnp.float32,
        remat: str = "none",
        rngs: nnx.Rngs,
    ):
        self.remat = remat
        strides = (stem_stride, *[1] * (len(widths) - 1))
        self.stacks = nnx.List([
            Stack(i, o, blocks, stride=stride, dtype=dtype, rngs=rngs)
            for i, o, stride in zip((channels, *widths[:-1]), widths, strides, strict=True)
        ])  # fmt: skip
        for halves in (stem_stride, *[2] * len(widths)):
            size = -(-size // halves)
        self.feature_dim = size**2 * widths[-1]

    @classmethod
    def from_config(
        cls, config: Any, sample: Map, *, view_size: int, dtype: Any, remat: str, rngs: nnx.Rngs
    ) -> "Impala":
        """See `jepa_jax.models.registry.Encoder`."""
        options = {"blocks": config.blocks, "stem_stride": config.stem_stride, "dtype": dtype, "remat": remat}
        return cls(view_size, sample.shape[-1], config.widths, **options, rngs=rngs)

    def __call__(self, images: Map, *, train: bool = False) -> Float[Array, "b f"]:
        del train  # it has no norms and no dropout
        run = rematerialized(lambda stack, x: stack(x), self.remat)
        x = images
        for stack in self.stacks:
            x = run(stack, x)
        return jax.nn.relu(x).reshape(x.shape[0], -1)
