"""Convolution that is fast everywhere: cuDNN's on GPUs, matrix products with their own gradient on CPUs.

XLA's CPU convolution is several times slower than the matrix product that says the same, backwards above all. The
matrix units of NVIDIA GPUs take 16-bit channels in eights: fewer, as the three of an image, are filled up with zeros.
Which of them a program holds is settled when it is lowered, so a step traced on a CPU machine and compiled for a GPU
holds plain convolutions.
"""

from collections.abc import Callable
from functools import cache, partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jepa_jax.models.kernels import forward_mode
from jepa_jax.models.remat import product

_Pads = tuple[tuple[int, int], tuple[int, int]]
_Function = Callable[..., Array]

_DIMENSIONS = ("NHWC", "HWIO", "NHWC")
_CHANNELS = 8  # that cuDNN's kernels for 16-bit numbers take at a time; XLA fills them up for float16 alone


def conv2d(x: Array, kernel: Array, *, stride: int = 1, padding: int | _Pads) -> Array:
    """Returns cross-correlations of x [B, H, W, I] with kernel [h, w, I, O], or, depthwise, with kernel [h, w, 1, I].

    Args:
      padding: zeros on all sides, or ((top, bottom), (left, right)).
    """
    if x.shape[-1] != kernel.shape[2] and not _is_depthwise(x, kernel):
        raise TypeError(f"conv2d: x has {x.shape[-1]} channels, which do not fit a kernel of shape {kernel.shape}")
    if x.dtype != kernel.dtype:
        raise TypeError(f"conv2d: x is {x.dtype} and kernel is {kernel.dtype}; cast one of them")
    pads = ((padding, padding), (padding, padding)) if isinstance(padding, int) else padding
    few = x.dtype == jnp.bfloat16 and x.shape[-1] < _CHANNELS and not _is_depthwise(x, kernel)
    others = {"cpu": _matmul_conv, **({"cuda": _filled_conv} if few else {})}
    return product(_by_platform(_plain_conv, others, x, kernel, stride=stride, pads=pads))


def _by_platform(default: _Function, others: dict[str, _Function], *operands: Array, **options: Any) -> Array:
    """Applies the formulation of the platform; the default in forward mode, which takes no gradient of their own."""
    if forward_mode:
        return default(*operands, **options)
    return _settled_when_lowered(default, tuple(others.items()), tuple(options.items()))(*operands)


@cache
def _settled_when_lowered(
    default: _Function, others: tuple[tuple[str, _Function], ...], options: tuple[tuple[str, Any], ...]
) -> _Function:
    """Returns a function of arrays whose gradient keeps its operands alone: when traced, no platform is known yet."""
    formulations = {name: partial(one, **dict(options)) for name, one in (("default", default), *others)}

    @jax.custom_vjp
    def function(*operands: Array) -> Array:
        return lax.platform_dependent(*operands, **formulations)

    def backward(operands: tuple[Array, ...], dy: Array) -> tuple[Array, ...]:
        def gradient(formulation: _Function) -> Callable[..., tuple[Array, ...]]:
            return lambda dy, *operands: jax.vjp(formulation, *operands)[1](dy)

        return lax.platform_dependent(dy, *operands, **{name: gradient(one) for name, one in formulations.items()})

    function.defvjp(lambda *operands: (function(*operands), operands), backward)
    return function


def _is_depthwise(x: Array, kernel: Array) -> bool:
    return kernel.shape[2] == 1 and x.shape[-1] == kernel.shape[3]


def _plain_conv(x: Array, kernel: Array, stride: int, pads: _Pads) -> Array:
    groups = x.shape[-1] // kernel.shape[2]
    return lax.conv_general_dilated(
        x, kernel, (stride, stride), pads, dimension_numbers=_DIMENSIONS, feature_group_count=groups
    )


def _filled_conv(x: Array, kernel: Array, stride: int, pads: _Pads) -> Array:
    more = _CHANNELS - x.shape[-1]
    x, kernel = jnp.pad(x, ((0, 0),) * 3 + ((0, more),)), jnp.pad(kernel, ((0, 0), (0, 0), (0, more), (0, 0)))
    return _plain_conv(x, kernel, stride, pads)


def _matmul_conv(x: Array, kernel: Array, stride: int, pads: _Pads) -> Array:
    dtype = x.dtype
    x, kernel = x.astype(jnp.float32), kernel.astype(jnp.float32)  # sums in float32; CPUs emulate anything shorter
    if _is_depthwise(x, kernel):
        taps = _taps(x, (kernel.shape[0], kernel.shape[1]), stride, pads)
        y = reduce(jnp.add, map(jnp.multiply, taps, kernel.reshape(len(taps), -1)))
    elif stride == 1 and _winograd_pays(x.shape, kernel.shape, pads):
        y = _winograd_conv(x, kernel, pads)
    elif stride == 1 and _row_split_pays(kernel.shape):
        y = _row_split_conv(x, kernel, pads)
    else:
        columns = _columns(x, (kernel.shape[0], kernel.shape[1]), stride, pads)  # [B, H', W', h w I]
        y = _product(columns, kernel.reshape(-1, kernel.shape[-1]))
    return y.astype(dtype)


def _row_split_pays(kernel_shape: tuple[int, ...]) -> bool:
    """Whether fewer numbers move when only the taps of a row become columns and the rows are added afterwards."""
    height, width, inputs, outputs = kernel_shape
    return width * inputs + height * outputs < height * width * inputs + outputs


def _row_split_conv(x: Array, kernel: Array, pads: _Pads) -> Array:
    """One product for all kernel rows at once, then their sum."""
    height, width, inputs, outputs = kernel.shape
    columns = _columns(x, (1, width), 1, ((0, 0), pads[1]))  # [B, H, W', w I]
    flat = kernel.transpose(1, 2, 0, 3).reshape(width * inputs, height * outputs)
    return _add_rows(_product(columns, flat), height, pads[0])


def _add_rows(rows: Array, height: int, pads: tuple[int, int]) -> Array:
    """Sum of the products of all kernel rows, each shifted to its place: [B, H, W, h O] -> [B, H', W, O]."""
    shifts = [((pads[0] - i, pads[1] - (height - 1 - i)), (0, 0)) for i in range(height)]
    placed = [_pad(row, shift) for row, shift in zip(jnp.split(rows, height, axis=-1), shifts, strict=True)]
    return reduce(jnp.add, placed)


def _product(columns: Array, flat: Array) -> Array:
    y = columns.reshape(-1, flat.shape[0]) @ flat
    return y.reshape(*columns.shape[:3], -1)


def _columns(x: Array, window: tuple[int, int], stride: int, pads: _Pads) -> Array:
    """The window under each output, its taps side by side: [B, H', W', h w I]."""
    return jnp.concatenate(_taps(x, window, stride, pads), axis=-1)


def _taps(x: Array, window: tuple[int, int], stride: int, pads: _Pads) -> list[Array]:
    """The inputs under each tap of the window, row by row: [B, H', W', I] each."""
    x = _pad(x, pads)
    rows, columns = ((n - k) // stride + 1 for n, k in zip(x.shape[1:3], window, strict=True))
    return [
        x[:, i : i + (rows - 1) * stride + 1 : stride, j : j + (columns - 1) * stride + 1 : stride]
        for i in range(window[0])
        for j in range(window[1])
    ]


def _pad(x: Array, pads: _Pads) -> Array:
    """Zeros around the image; negative padding cuts."""
    return lax.pad(x, jnp.zeros((), x.dtype), ((0, 0, 0), (*pads[0], 0), (*pads[1], 0), (0, 0, 0)))


# Winograd's F(4, 3) along the width (Lavin and Gray 2015, arXiv:1509.09308): six products give four outputs of three
# taps each, half of the multiplications. Along the height as well it would save more, and lose it moving tiles.
_TILE = 4
_KERNEL_TO_TILE = np.array([[6, 0, 0], [-4, -4, -4], [-4, 4, -4], [1, 2, 4], [1, -2, 4], [0, 0, 24]], np.float32) / 24


def _winograd_pays(shape: tuple[Any, ...], kernel_shape: tuple[int, ...], pads: _Pads) -> bool:
    """Wide layers, enough outputs a kernel number to pay for its transform, and few outputs beyond the edge."""
    _, width, inputs, outputs = kernel_shape
    out_width = shape[2] + sum(pads[1]) - width + 1
    few_beyond = -out_width % _TILE <= out_width // 4
    batch = shape[0] if isinstance(shape[0], int) else 1  # a batch of any size, as in an exported program
    return width == 3 and min(inputs, outputs) >= 64 and few_beyond and batch * shape[1] * out_width >= 1024


def _winograd_conv(x: Array, kernel: Array, pads: _Pads) -> Array:
    height, _, inputs, outputs = kernel.shape
    tiles = _input_tiles(x, pads[1])
    flat = jnp.einsum("tw,hwio->tiho", _KERNEL_TO_TILE, kernel).reshape(6, inputs, height * outputs)
    t0, t1, t2, t3, t4, t5 = (_add_rows(_product(v, u), height, pads[0]) for v, u in zip(tiles, flat, strict=True))
    even, odd, even2, odd2 = t1 + t2, t1 - t2, t3 + t4, t3 - t4
    neighbours = t0 + even + even2, odd + 2 * odd2, even + 4 * even2, odd + 8 * odd2 + t5
    y = jnp.stack(neighbours, axis=3)  # [B, H', n, 4, O]
    out_width = x.shape[2] + sum(pads[1]) - 2
    return y.reshape(*y.shape[:2], -1, outputs)[:, :, :out_width]


def _input_tiles(x: Array, pads: tuple[int, int]) -> list[Array]:
    """Six combinations of the six inputs behind four neighbouring outputs: [B, H, n, I] each."""
    out_width = x.shape[2] + sum(pads) - 2
    x = _pad(x, ((0, 0), (pads[0], pads[1] + -out_width % _TILE)))
    last = x.shape[2] - 6
    x0, x1, x2, x3, x4, x5 = (x[:, :, i : i + last + 1 : _TILE] for i in range(6))
    even, odd, even2, odd2 = x4 - 4 * x2, x3 - 4 * x1, x4 - x2, 2 * (x3 - x1)
    return [4 * x0 - 5 * x2 + x4, even + odd, even - odd, even2 + odd2, even2 - odd2, 4 * x1 - 5 * x3 + x5]


def max_pool(x: Array, *, window: int, stride: int, padding: int = 0) -> Array:
    """Maximum over windows of x [B, H, W, C]; on CPUs twice as fast as XLA's, forward and backward."""
    return _by_platform(_window_max, {"cpu": _sliced_max}, x, window=window, stride=stride, padding=padding)


def _window_max(x: Array, window: int, stride: int, padding: int) -> Array:
    pads = ((0, 0), (padding, padding), (padding, padding), (0, 0))
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, window, window, 1), (1, stride, stride, 1), pads)


def _sliced_max(x: Array, window: int, stride: int, padding: int) -> Array:
    pads = ((0, 0, 0), (padding, padding, 0), (padding, padding, 0), (0, 0, 0))
    x = lax.pad(x, jnp.array(-jnp.inf, x.dtype), pads)
    for axis in (1, 2):
        last = (x.shape[axis] - window) // stride * stride
        x = reduce(jnp.maximum, (lax.slice_in_dim(x, i, i + last + 1, stride, axis) for i in range(window)))
    return x
