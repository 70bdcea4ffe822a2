"""Numerics: the package's formulations of a device against plain float32 formulas on the CPU, gradients included."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array, lax

from jepa_jax.data.augment import Boxes, resize_boxes
from jepa_jax.device_check.findings import Findings
from jepa_jax.device_check.small_steps import RECIPES, make_step
from jepa_jax.models.kernels.attention import attention
from jepa_jax.models.kernels.conv import conv2d
from jepa_jax.models.kernels.linear import affine
from jepa_jax.models.kernels.mlp import gelu
from jepa_jax.models.kernels.norm import BatchNorm, layer_norm

WIDTHS, LENGTHS = (32, 48, 64, 80, 128), (64, 65, 78, 196, 257)
USUAL_WIDTH, USUAL_LENGTH = 64, 78
ALL_PAIRS_MINUTES = 15.0  # with which every width is tried with every length
ON_CPU = ("ijepa", "mae")  # methods of which a CPU takes a step: they differ by kernels, not by method
# Largest errors, relative to the largest number of the result. GPUs multiply float32 as TF32, with 10 bits.
LIMITS = {"float32": 4e-3, "bfloat16": 3e-2}
# Of the change of all parameters in one step against that on the CPU in float32: cosine at least, loss at most so off.
STEP_LIMITS = {"float32": (0.999, 2e-3), "bfloat16": (0.97, 3e-2)}
Function = Callable[..., Array]


class Operation(NamedTuple):
    """A formulation, the formula that it stands for, and arrays to try both with."""

    name: str
    function: Function
    formula: Function
    arrays: Sequence[np.ndarray]


def operations(*, all_pairs: bool) -> Iterator[Operation]:
    """Yields every operation that has formulations of its own for some platform."""
    random = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return random.normal(size=shape).astype(np.float32)

    for width in WIDTHS:
        for length in LENGTHS:
            if all_pairs or width == USUAL_WIDTH or length == USUAL_LENGTH:
                arrays = [normal(2, length, 2, width) for _ in range(3)]
                yield Operation(f"attention, {length} tokens, width {width}", attention, _attention, arrays)
    for stride in (1, 2):
        arrays = [normal(2, 16, 16, 32), normal(3, 3, 32, 32) / 17]
        yield Operation(
            f"3 x 3 convolution, stride {stride}",
            lambda x, kernel, stride=stride: conv2d(x, kernel, stride=stride, padding=1),
            lambda x, kernel, stride=stride: _convolution(x, kernel, stride),
            arrays,
        )
    yield Operation("dense layer", affine, lambda x, kernel, bias: x @ kernel + bias, [
        normal(4, 65, 64), normal(64, 96) / 8, normal(96),
    ])  # fmt: skip
    yield Operation("batch norm", _own_batch_norm, _batch_norm, [normal(8, 6, 6, 32) + 1])
    yield Operation(
        "layer norm",
        lambda x, scale, bias: layer_norm(x, scale, bias, 1e-6),
        lambda x, scale, bias: (x - _mean(x)) / jnp.sqrt(_mean((x - _mean(x)) ** 2) + 1e-6) * scale + bias,
        [normal(4, 65, 64), normal(64), normal(64)],
    )
    yield Operation("GELU", gelu, lambda x: x * 0.5 * (1 + lax.erf(x / np.sqrt(2))), [normal(4, 65, 64)])
    yield Operation("resized crop", _own_resize, _resize, [normal(2, 24, 3, 24)])


def _mean(x: Array) -> Array:
    return jnp.mean(x, axis=-1, keepdims=True)


def _attention(q: Array, k: Array, v: Array) -> Array:
    scores = jnp.einsum("bnhd,bmhd->bhnm", q, k) / np.sqrt(q.shape[-1])
    return jnp.einsum("bhnm,bmhd->bnhd", jax.nn.softmax(scores), v)


def _convolution(x: Array, kernel: Array, stride: int) -> Array:
    padding, names = ((1, 1), (1, 1)), ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, kernel, (stride, stride), padding, dimension_numbers=names)


def _own_batch_norm(x: Array) -> Array:
    return BatchNorm(x.shape[-1], dtype=x.dtype, rngs=nnx.Rngs(0))(x, train=True)


def _batch_norm(x: Array) -> Array:
    axes = tuple(range(x.ndim - 1))
    return (x - x.mean(axes)) / jnp.sqrt(x.var(axes) + 1e-5)


def _own_resize(rows: Array) -> Array:
    whole = jnp.zeros(len(rows), jnp.int32)
    boxes = Boxes(whole, whole, whole + rows.shape[1], whole + rows.shape[3])
    return resize_boxes(rows.astype(jnp.float32), boxes, jnp.zeros(len(rows), bool), 16, 16)


def _resize(rows: Array) -> Array:
    return jax.image.resize(rows, (len(rows), 16, rows.shape[2], 16), "linear")


def relative_error(operation: Operation, dtype: Any, device: Any) -> float:
    """Returns the largest error of the results and gradients, relative to the largest number of each."""
    rounded = [np.asarray(jnp.asarray(array).astype(dtype)) for array in operation.arrays]
    found = _results(operation.function, rounded, device)
    with jax.default_matmul_precision("highest"):
        wide = [array.astype(np.float32) for array in rounded]
        expected = _results(operation.formula, wide, jax.local_devices(backend="cpu")[0])
    pairs = zip(found, expected, strict=True)
    return max(float(np.max(np.abs(a.astype(np.float32) - b)) / np.max(np.abs(b))) for a, b in pairs)


def _results(function: Function, arrays: Sequence[np.ndarray], device: Any) -> list[np.ndarray]:
    """Returns the result and the gradients of a weighted sum of it."""

    def everything(*operands: Array) -> tuple[Array, ...]:
        y, pull = jax.vjp(function, *operands)
        weights = jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).astype(jnp.bfloat16)  # the same in both precisions
        return y, *pull(weights.reshape(y.shape).astype(y.dtype))

    return [np.asarray(one) for one in jax.jit(everything)(*jax.device_put(list(arrays), device))]


def check_operation(operation: Operation, dtype: str, device: Any, findings: Findings) -> None:
    """Compares an operation in one precision with its formula."""
    try:
        error = relative_error(operation, dtype, device)
    except Exception as failure:  # what XLA or Triton raise where a kernel cannot be compiled
        findings.true(f"{operation.name}, {dtype}", False, f"{type(failure).__name__}: {str(failure)[:200]}")
    else:
        findings.at_most(f"{operation.name}, {dtype}: relative error", error, LIMITS[dtype])


def check_step(method: str, precision: str, device: Any, findings: Findings) -> None:
    """Compares a training step of a method with the same step in float32 on the CPU."""
    expected_loss, expected = _step(method, "float32", jax.local_devices(backend="cpu")[0])
    loss, found = _step(method, precision, device)
    cosine = float(np.vdot(found, expected) / (np.linalg.norm(found) * np.linalg.norm(expected)))
    least, most = STEP_LIMITS[precision]
    findings.at_least(f"step of {method}, {precision}: cosine of the update", cosine, least)
    off = abs(loss - expected_loss) / max(abs(expected_loss), 1e-2)
    findings.at_most(f"step of {method}, {precision}: relative error of the loss", off, most)


def _step(method: str, precision: str, device: Any) -> tuple[float, np.ndarray]:
    """Returns the loss of one step, and the change of all parameters in one row."""
    small = make_step(method, [device], train__precision=precision)
    before = [np.array(leaf) for leaf in jax.tree.leaves(small.state.params)]
    state, metrics = small.program.train_step(small.state, small.batch)
    changes = [np.asarray(leaf) - old for leaf, old in zip(jax.tree.leaves(state.params), before, strict=True)]
    return float(metrics["loss"]), np.concatenate([change.ravel() for change in changes])


def run(findings: Findings, minutes: float) -> None:
    """Checks all operations in both precisions, and a step of each method."""
    device = jax.local_devices()[0]
    # Where all sizes are computed alike, and a step in float32 is what it would be compared with.
    on_cpu = device.platform == "cpu"
    for operation in operations(all_pairs=minutes >= ALL_PAIRS_MINUTES and not on_cpu):
        for dtype in LIMITS:
            check_operation(operation, dtype, device, findings)
    for method in ON_CPU if on_cpu else RECIPES:
        for precision in ["bfloat16"] if on_cpu else STEP_LIMITS:
            check_step(method, precision, device, findings)
