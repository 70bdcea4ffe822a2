"""A small U-Net, and the transposed convolution that enlarges maps."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jepa_jax.models.kernels.conv import conv2d, max_pool
from jepa_jax.models.resnet import ConvNorm

Map = Float[Array, "b h w c"]
OutputMap = Float[Array, "b p q d"]


class Enlarge(nnx.Module):
    """Transposed convolution, 4 x 4 pixels with stride 2, without bias: a map of twice the size.

    Each of the four phases of the output (even or odd rows and columns) reads 2 x 2 inputs, so it is four convolutions
    without inserted zeros.
    """

    def __init__(self, inputs: int, outputs: int, *, dtype: Any, rngs: nnx.Rngs):
        self.dtype = dtype
        kaiming = nnx.initializers.variance_scaling(2.0, "fan_out", "normal")
        self.kernel = nnx.Param(kaiming(rngs.params(), (4, 4, inputs, outputs)))

    def __call__(self, x: Map) -> OutputMap:
        x, kernel = x.astype(self.dtype), self.kernel[...].astype(self.dtype)
        # An even output reads the input before it and its own, with taps 3 and 1; an odd one its own and the next.
        taps, pads = (slice(3, None, -2), slice(2, None, -2)), ((1, 0), (0, 1))
        phases = [
            conv2d(x, kernel[taps[row], taps[column]], padding=(pads[row], pads[column]))
            for row in (0, 1)
            for column in (0, 1)
        ]
        batch, height, width, channels = phases[0].shape
        square = jnp.stack(phases, axis=3).reshape(batch, height, width, 2, 2, channels)
        return square.transpose(0, 1, 3, 2, 4, 5).reshape(batch, 2 * height, 2 * width, channels)


class DoubleConv(nnx.Module):
    """Twice: 3 x 3 convolution, batch norm, ReLU."""

    def __init__(self, inputs: int, outputs: int, *, dtype: Any, rngs: nnx.Rngs):
        self.first = ConvNorm(inputs, outputs, 3, dtype=dtype, rngs=rngs)
        self.second = ConvNorm(outputs, outputs, 3, dtype=dtype, rngs=rngs)

    def __call__(self, x: Map, *, train: bool) -> OutputMap:
        return self.second(self.first(x, train), train)


class UNet(nnx.Module):
    """Maps a map to features of the same size; each further width halves the maps in between.

    Maps of odd size are padded at the lower and right border on the way up to fit their shortcut.
    """

    def __init__(self, inputs: int, widths: Sequence[int], *, dtype: Any = jnp.float32, rngs: nnx.Rngs):
        options: dict[str, Any] = {"dtype": dtype, "rngs": rngs}
        pairs = list(zip((inputs, *widths[:-1]), widths, strict=True))
        self.down = nnx.List([DoubleConv(i, o, **options) for i, o in pairs])
        upwards = list(zip(widths[:0:-1], widths[-2::-1], strict=True))
        self.enlarge = nnx.List([Enlarge(i, o, **options) for i, o in upwards])
        self.up = nnx.List([DoubleConv(2 * o, o, **options) for _, o in upwards])

    def __call__(self, x: Map, *, train: bool = False) -> OutputMap:
        shortcuts: list[Array] = []
        for block in self.down:
            x = block(max_pool(shortcuts[-1], window=2, stride=2) if shortcuts else x, train=train)
            shortcuts.append(x)
        for enlarge, block, shortcut in zip(self.enlarge, self.up, shortcuts[-2::-1], strict=True):
            y = enlarge(x)
            missing = [(0, whole - part) for whole, part in zip(shortcut.shape[1:3], y.shape[1:3], strict=True)]
            y = jnp.pad(y, ((0, 0), *missing, (0, 0)))
            x = block(jnp.concatenate([shortcut, y], axis=-1), train=train)
        return x
