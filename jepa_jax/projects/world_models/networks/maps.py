"""Encoder and predictor of video JEPA, which keep the grid of a frame: residual blocks and a U-Net."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jepa_jax.models.kernels.norm import BatchNorm
from jepa_jax.models.resnet import ConvNorm, ResidualBlock

Map = Float[Array, "b h w c"]
OutputMap = Float[Array, "b p q d"]


class FrameEncoder(nnx.Module):
    """A 3 x 3 stem and residual blocks; maps frames to latents [h, w, widths[-1]], h = H / product of strides."""

    def __init__(
        self, channels: int, stem: int, widths: Sequence[int], strides: Sequence[int], *, dtype: Any, rngs: nnx.Rngs
    ):
        options: dict[str, Any] = {"dtype": dtype, "rngs": rngs}
        self.stem = ConvNorm(channels, stem, 3, **options)
        pairs = zip((stem, *widths[:-1]), widths, strides, strict=True)
        self.blocks = nnx.List([ResidualBlock(i, o, stride=s, bottleneck=False, **options) for i, o, s in pairs])

    def __call__(self, frames: Map, *, train: bool = False) -> OutputMap:
        x = self.stem(frames, train)
        for block in self.blocks:
            x = block(x, train)
        return x


class Doubled(nnx.Module):
    """A transposed convolution of 2 x 2 pixels with stride 2, which is one product per pixel."""

    def __init__(self, inputs: int, outputs: int, *, dtype: Any, rngs: nnx.Rngs):
        self.linear = nnx.Linear(inputs, 4 * outputs, use_bias=False, dtype=dtype, rngs=rngs)
        self.norm = BatchNorm(outputs, dtype=dtype, rngs=rngs)

    def __call__(self, x: Map, train: bool) -> OutputMap:
        batch, height, width, _ = x.shape
        x = self.linear(x).reshape(batch, height, width, 2, 2, -1)
        x = x.transpose(0, 1, 3, 2, 4, 5).reshape(batch, 2 * height, 2 * width, -1)
        return jax.nn.relu(self.norm(x, train=train))


class LatentUNet(nnx.Module):
    """Predicts the next latent from two; each further width halves the maps on the way down."""

    def __init__(self, latents: int, widths: Sequence[int], *, dtype: Any, rngs: nnx.Rngs):
        options: dict[str, Any] = {"dtype": dtype, "rngs": rngs}
        down = zip((2 * latents, *widths[:-1]), widths, (1, *[2] * (len(widths) - 1)), strict=True)
        self.down = nnx.List([ResidualBlock(i, o, stride=s, bottleneck=False, **options) for i, o, s in down])
        up = list(zip(widths[:0:-1], widths[-2::-1], strict=True))
        self.doubled = nnx.List([Doubled(i, o, **options) for i, o in up])
        self.up = nnx.List([ResidualBlock(2 * o, o, stride=1, bottleneck=False, **options) for _, o in up])
        self.out = nnx.Linear(widths[0], latents, dtype=dtype, rngs=rngs)

    def __call__(self, before: Map, last: Map, *, train: bool = False) -> OutputMap:
        x, shortcuts = jnp.concatenate([before, last], axis=-1), []
        for block in self.down:
            x = block(x, train)
            shortcuts.append(x)
        for doubled, block, shortcut in zip(self.doubled, self.up, shortcuts[-2::-1], strict=True):
            x = block(jnp.concatenate([shortcut, doubled(x, train)], axis=-1), train)
        return self.out(x)
