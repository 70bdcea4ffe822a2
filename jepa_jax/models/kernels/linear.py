"""Dense layers of transformers."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import PartitionSpec

from jepa_jax.models.kernels import forward_mode, without_gpu_kernels
from jepa_jax.models.remat import product

Operands = tuple[Array, Array, Array | None]


class Linear(nnx.Linear):
    """A dense layer whose result light remat keeps, with a gradient of its own."""

    def __call__(self, inputs: Array) -> Array:  # type: ignore[override]
        kernel, bias = self.kernel[...], None if self.bias is None else self.bias[...]
        dtype = self.dtype or jnp.promote_types(inputs.dtype, kernel.dtype)
        return product(affine(inputs.astype(dtype), kernel, bias))


def linear(inputs: int, outputs: int, dtype: Any, rngs: nnx.Rngs, *, bias: bool = True) -> Linear:
    """Returns a dense layer with float32 parameters that computes in `dtype`.

    The initial weights keep the scale of activations at any width. The usual fixed standard deviation of 0.02 is meant
    for widths near 768: in a narrow ViT tokens would consist almost entirely of their position.
    """
    initial = nnx.initializers.xavier_uniform()
    return Linear(inputs, outputs, use_bias=bias, dtype=dtype, kernel_init=initial, rngs=rngs)


def affine(x: Array, kernel: Array, bias: Array | None) -> Array:
    """Returns x [..., i] times a kernel [i, o], plus a bias [o], if there is one, in the type of x."""
    return _plain(x, kernel, bias) if forward_mode else _affine(x, kernel, bias)


@jax.custom_vjp
def _affine(x: Array, kernel: Array, bias: Array | None) -> Array:
    return lax.platform_dependent(x, kernel, bias, cpu=_on_cpu, default=_plain)


def _plain(x: Array, kernel: Array, bias: Array | None) -> Array:
    y = x @ kernel.astype(x.dtype)
    return y if bias is None else y + bias.astype(y.dtype)


def _on_cpu(x: Array, kernel: Array, bias: Array | None) -> Array:
    y = _sums(x, kernel.astype(x.dtype), x.ndim - 1, 0)
    return (y if bias is None else y + bias).astype(x.dtype)


def _affine_backward(operands: Operands, dy: Array) -> Operands:
    def plain(x: Array, kernel: Array, bias: Array | None, dy: Array) -> Operands:
        return jax.vjp(_plain, x, kernel, bias)[1](dy)

    return lax.platform_dependent(*operands, dy, cpu=_gradients_on_cpu, default=plain)


_affine.defvjp(lambda *operands: (_affine(*operands), operands), _affine_backward)


def _gradients_on_cpu(x: Array, kernel: Array, bias: Array | None, dy: Array) -> Operands:
    rows, drows = (array.reshape(-1, array.shape[-1]) for array in (x, dy))
    # XLA has no fast code for a product whose first operand is transposed, so the narrower one is transposed and
    # stored before. The barrier keeps XLA from transposing the product instead.
    narrow, wide = (rows, drows) if rows.shape[1] <= drows.shape[1] else (drows, rows)
    dkernel = lax.optimization_barrier(_sums(materialize(narrow.T), wide, 1, 0))
    dkernel = (dkernel if narrow is rows else materialize(dkernel.T)).astype(kernel.dtype)
    # XLA rounds partial sums in bfloat16 one by one, which took a fifth of a step.
    dbias = None if bias is None else jnp.sum(drows.astype(bias.dtype), axis=0)
    dx = _sums(drows, kernel.astype(dy.dtype), 1, 1).astype(x.dtype)
    return dx.reshape(x.shape), dkernel, dbias


def _sums(a: Array, b: Array, a_axis: int, b_axis: int) -> Array:
    """Returns products in float32 at least: only for these have CPUs instructions that multiply bfloat16 faster."""
    wide = jnp.promote_types(a.dtype, jnp.float32)
    return lax.dot_general(a, b, (((a_axis,), (b_axis,)), ((), ())), preferred_element_type=wide)


def row_major(x: Array) -> Array:
    """Returns x, which NVIDIA GPUs store in the order of its axes, and its gradient too.

    XLA would keep the tokens of some models with the batch innermost, and transpose them in every block.
    """

    def constrain(x: Array) -> Array:
        return with_layout_constraint(x, Layout(tuple(range(x.ndim))))

    def on_cuda(x: Array) -> Array:
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.size <= 1:
            return constrain(x)
        split = PartitionSpec(mesh.axis_names)  # XLA would gather what it is to lay out
        return jax.shard_map(constrain, in_specs=split, out_specs=split, check_vma=False)(x)

    if forward_mode or without_gpu_kernels:
        return x
    return lax.platform_dependent(x, cuda=on_cuda, default=lambda x: x)


def materialize(x: Array) -> Array:
    """Forces XLA on CPUs to store x instead of computing it again in each reader.

    XLA drops optimization barriers before its last fusion, but keeps layout constraints. It does not partition arrays
    with such a constraint, so that on several devices x gets a barrier.
    """
    if jax.sharding.get_abstract_mesh().size > 1:
        return lax.optimization_barrier(x)
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))
