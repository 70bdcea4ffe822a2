"""Convolution that is fast everywhere: cuDNN's on GPUs, matrix products with their own gradient on CPUs.

XLA's CPU convolution is several times slower than the matrix product that says the same, backwards above all.
Which of the two a program holds is settled when it is lowered, so a step traced on a CPU machine and compiled for a GPU
holds plain convolutions.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax

Padding = int | str | tuple[tuple[int, int], tuple[int, int]]
_Pads = tuple[tuple[int, int], tuple[int, int]]

_DIMENSIONS = ("NHWC", "HWIO", "NHWC")


def conv2d(x: Array, kernel: Array, *, stride: int = 1, padding: Padding) -> Array:
    """Cross-correlation of x [B, H, W, I] with kernel [h, w, I, O]; padding: an int, "SAME", "VALID" or
    ((top, bottom), (left, right))."""
    if x.dtype != kernel.dtype:
        raise TypeError(f"conv2d: x is {x.dtype} and kernel is {kernel.dtype}; cast one of them")
    return _conv(x, kernel, stride, _explicit_padding(padding, x.shape[1:3], kernel.shape[:2], stride))


def _explicit_padding(padding: Padding, size: tuple[int, ...], window: tuple[int, ...], stride: int) -> _Pads:
    if isinstance(padding, int):
        return ((padding, padding), (padding, padding))
    if isinstance(padding, str):
        rows, columns = lax.padtype_to_pads(size, window, (stride, stride), padding)
        return (tuple(rows), tuple(columns))
    return tuple(tuple(p) for p in padding)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _conv(x: Array, kernel: Array, stride: int, pads: _Pads) -> Array:
    return lax.platform_dependent(
        x,
        kernel,
        cpu=lambda x, kernel: _matmul_conv(x, kernel, stride, pads),
        default=lambda x, kernel: _plain_conv(x, kernel, stride, pads),
    )


def _conv_forward(x, kernel, stride, pads):
    # The same residuals for every platform: the choice is not made yet.
    return _conv(x, kernel, stride, pads), (x, kernel)


def _conv_backward(stride, pads, residuals, dy):
    x, kernel = residuals
    return lax.platform_dependent(
        x,
        kernel,
        dy,
        cpu=lambda x, kernel, dy: (
            _input_gradient(dy, kernel, x.shape, stride, pads),
            _kernel_gradient(x, dy, kernel.shape, stride, pads).astype(kernel.dtype),
        ),
        default=lambda x, kernel, dy: jax.vjp(lambda x, k: _plain_conv(x, k, stride, pads), x, kernel)[1](dy),
    )


_conv.defvjp(_conv_forward, _conv_backward)


def _plain_conv(x: Array, kernel: Array, stride: int, pads: _Pads) -> Array:
    return lax.conv_general_dilated(x, kernel, (stride, stride), pads, dimension_numbers=_DIMENSIONS)


def _matmul_conv(x: Array, kernel: Array, stride: int, pads: _Pads) -> Array:
    if _splits_rows(kernel.shape, stride):
        return _row_split_conv(x, kernel, pads)
    columns = _columns(x, kernel.shape[:2], stride, pads)  # [B, H', W', h w I]
    return _product(columns, kernel.reshape(-1, kernel.shape[-1])).astype(x.dtype)


def _splits_rows(kernel_shape: tuple[int, ...], stride: int) -> bool:
    """Whether fewer numbers move when only the taps of a row become columns and the rows are added afterwards."""
    height, width, inputs, outputs = kernel_shape
    return stride == 1 and width * inputs + height * outputs < height * width * inputs + outputs


def _row_split_conv(x: Array, kernel: Array, pads: _Pads) -> Array:
    """One product for all kernel rows at once, then their sum, each row shifted to its place."""
    height, width, inputs, outputs = kernel.shape
    columns = _columns(x, (1, width), 1, ((0, 0), pads[1]))  # [B, H, W', w I]
    flat = kernel.transpose(1, 2, 0, 3).reshape(width * inputs, height * outputs)
    rows = _product(columns, flat)  # [B, H, W', h O]
    shifted = (
        _pad(rows[..., i * outputs : (i + 1) * outputs], (shift, (0, 0)))
        for i, shift in enumerate(_row_shifts(height, pads[0]))
    )
    return sum(shifted).astype(x.dtype)


def _row_shifts(height: int, pads: tuple[int, int]) -> list[tuple[int, int]]:
    """Rows to add (or, negative, to cut) above and below the product of each kernel row."""
    return [(pads[0] - i, pads[1] - (height - 1 - i)) for i in range(height)]


def _product(columns: Array, flat: Array) -> Array:
    y = jnp.matmul(columns.reshape(-1, flat.shape[0]), flat, preferred_element_type=jnp.float32)
    return y.reshape(*columns.shape[:3], -1)


def _columns(x: Array, window: tuple[int, int], stride: int, pads: _Pads) -> Array:
    """The window under each output, its taps side by side: [B, H', W', h w I]."""
    x = _pad(x, pads)
    rows, columns = ((n - k) // stride + 1 for n, k in zip(x.shape[1:3], window, strict=True))
    taps = [
        x[:, i : i + (rows - 1) * stride + 1 : stride, j : j + (columns - 1) * stride + 1 : stride]
        for i in range(window[0])
        for j in range(window[1])
    ]
    return jnp.concatenate(taps, axis=-1)


def _pad(x: Array, pads: _Pads) -> Array:
    """Zeros around the image; negative padding cuts."""
    return lax.pad(x, jnp.zeros((), x.dtype), ((0, 0, 0), (*pads[0], 0), (*pads[1], 0), (0, 0, 0)))


def _kernel_gradient(x: Array, dy: Array, shape: tuple[int, ...], stride: int, pads: _Pads) -> Array:
    if not _splits_rows(shape, stride):
        return _outer_product(_columns(x, shape[:2], stride, pads), dy).reshape(shape)
    height, width, inputs, outputs = shape
    columns = _columns(x, (1, width), 1, ((0, 0), pads[1]))
    shifts = _row_shifts(height, pads[0])
    rows = [_pad(dy, ((-above, -below), (0, 0))) for above, below in shifts]
    rows = jnp.concatenate(rows, axis=-1)  # [B, H, W', h O]
    return _outer_product(columns, rows).reshape(width, inputs, height, outputs).transpose(2, 0, 1, 3)


def _outer_product(columns: Array, dy: Array) -> Array:
    columns, dy = (a.reshape(-1, a.shape[-1]) for a in (columns, dy))
    return jnp.matmul(columns.T, dy, preferred_element_type=jnp.float32)


def _input_gradient(dy: Array, kernel: Array, shape: tuple[int, ...], stride: int, pads: _Pads) -> Array:
    """Inputs that lie `stride` apart see the same taps: one stride-1 convolution of dy for each offset, interleaved."""
    taps = jnp.swapaxes(kernel, 2, 3)  # [h, w, O, I]
    offsets = [_phase_taps(o, shape[1], dy.shape[1], kernel.shape[0], stride, pads[0][0]) for o in range(stride)]
    columns = [_phase_taps(o, shape[2], dy.shape[2], kernel.shape[1], stride, pads[1][0]) for o in range(stride)]
    phases = []
    for row, row_pads in offsets:
        for column, column_pads in columns:
            part = taps[row][:, column][::-1, ::-1]
            if part.size == 0:
                size = (-(-shape[1] // stride), -(-shape[2] // stride))
                phases.append(jnp.zeros((shape[0], *size, shape[3]), dy.dtype))
            else:
                phases.append(_matmul_conv(dy, part, 1, (row_pads, column_pads)))
    if stride == 1:
        return phases[0]
    dx = jnp.stack(phases, axis=3)  # [B, H/s, W/s, s s, I]
    batch, height, width, _, features = dx.shape
    dx = dx.reshape(batch, height, width, stride, stride, features).transpose(0, 1, 3, 2, 4, 5)
    return dx.reshape(batch, height * stride, width * stride, features)[:, : shape[1], : shape[2]]


def _phase_taps(offset: int, size: int, out_size: int, window: int, stride: int, before: int):
    """Taps that reach the inputs offset, offset + stride, ... and the padding of dy that lines them up."""
    shift, first = divmod(offset + before, stride)
    count = len(range(first, window, stride))
    low = count - 1 - shift
    high = -(-size // stride) - out_size + shift
    return slice(first, None, stride), (low, high)
