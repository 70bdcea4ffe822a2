"""Softmax attention that is fast everywhere, with one meaning: softmax(q k' / sqrt(d)) v for each head.

Which formulation a program holds is settled when it is lowered, as for convolutions. On CPUs heads are batches of plain
matrix products with a gradient that reuses the softmax of the forward pass. On NVIDIA GPUs from Ampere on
self-attention is fused, so that the matrix of scores is never written: by cuDNN, or by a kernel of our own
(`fused_attention.py`) for what cuDNN does not take and for GPUs that are not there. Elsewhere it is XLA's.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec
from jaxtyping import Bool, Float

from jepa_jax.base.errors import UserError
from jepa_jax.models.kernels import forward_mode, without_gpu_kernels
from jepa_jax.models.kernels.linear import materialize
from jepa_jax.models.remat import product
from jepa_jax.runtime.hardware import MULTIPROCESSORS, compute_capability, is_gpu_here

FUSED_LENGTH = 16  # tokens from which on attention is fused on GPUs
FUSED_BLOCKS = (64, 32, 16)  # tokens of a block of scores in it, the fastest first
# A smaller block covers less beyond the last token. It is taken if it does with this share of the products.
WORTHWHILE, SMALLEST_SAVING = 0.75, 32
AMPERE = (8, 0)  # compute capability of the first GPUs that have bfloat16 and that Triton compiles for
MASKED_SCORE = -1e30  # score of a key that is not attended to; finite, so that rows without any key have no NaN
CUDNN_WIDTH, CUDNN_GRAIN = 128, 8  # widest head that cuDNN takes on all of these GPUs, and what divides its width
AUTO, CUDNN, KERNEL, XLA = "auto", "cudnn", "kernel", "xla"
IMPLEMENTATIONS = (AUTO, CUDNN, KERNEL, XLA)  # values of `model.attention`


def self_attention(qkv: Float[Array, "b n heads d"], implementation: str = AUTO) -> Float[Array, "b n heads/3 d"]:
    """Returns attention outputs of queries, keys and values, whose heads stand behind each other in `qkv`.

    Args:
      implementation: on NVIDIA GPUs: `cudnn`, `kernel`, `xla`, or `auto` for the first of them that applies.
    """

    def split(formulation: Callable[..., Array]) -> Callable[[Array], Array]:
        return lambda qkv: formulation(*jnp.split(qkv, 3, axis=2))

    if forward_mode:
        return split(_plain)(qkv)
    if fused := _fused_formulation(qkv.shape, qkv.dtype, implementation):
        return fused(qkv)  # names itself what light remat keeps, which it could not in a branch
    return product(lax.platform_dependent(qkv, cpu=split(_on_cpu), cuda=split(_unfused()), default=split(_plain)))


def attention(
    q: Float[Array, "b n h d"],
    k: Float[Array, "b m h d"],
    v: Float[Array, "b m h d"],
    mask: Bool[Array, "b m"] | None = None,
) -> Float[Array, "b n h d"]:
    """Returns attention outputs; keys outside `mask` are not attended to."""
    if forward_mode:
        return _plain(q, k, v, mask)
    masks = () if mask is None else (mask,)
    if mask is None and q.shape == k.shape:
        batch, length, heads, width = q.shape
        if fused := _fused_formulation((batch, length, 3 * heads, width), q.dtype, AUTO):
            return fused(jnp.concatenate([q, k, v], axis=2))
    return product(lax.platform_dependent(q, k, v, *masks, cpu=_on_cpu, cuda=_unfused(), default=_plain))


def _unfused() -> Callable[..., Array]:
    """Returns XLA's formulation for the GPU that the program is for; before Ampere there are no bfloat16 products."""
    return _in_float32 if (compute_capability() or AMPERE) < AMPERE else _plain


def _fused_formulation(shape: tuple[Any, ...], dtype: Any, implementation: str) -> Callable[[Array], Array] | None:
    """Returns the fused formulation for joined queries, keys and values of this shape; None to let XLA do it."""
    capability = compute_capability()
    if capability is None:  # programs are for CPUs here: tracing the kernel takes longer than the rest of attention
        return None
    short = implementation == AUTO and shape[1] < FUSED_LENGTH
    if without_gpu_kernels or implementation == XLA or capability < AMPERE or short:
        return None
    if implementation != KERNEL and _cudnn_applies(shape, dtype):
        return functools.partial(_per_device, _by_cudnn)
    if implementation == CUDNN and is_gpu_here():
        heads = f"{shape[1]} tokens with heads of {shape[-1]} numbers in {dtype}"
        raise UserError(f"config.model.attention = cudnn: cuDNN is not there or does not take {heads}; use auto")
    block = fused_block(shape[1], shape[-1], dtype.itemsize)
    # A new function for each call: JAX would reuse the trace of another GPU.
    return functools.partial(_per_device, functools.partial(_by_kernel, block=block)) if block else None


def _cudnn_applies(shape: tuple[Any, ...], dtype: Any) -> bool:
    """Returns whether cuDNN takes such heads, and gives their gradients, on the GPU of this process.

    Plans cannot ask it. JAX refuses gradients of odd lengths alone.
    """
    width, halves = shape[-1], dtype in (jnp.bfloat16, jnp.float16)
    if not is_gpu_here() or not halves or width > CUDNN_WIDTH or width % CUDNN_GRAIN:
        return False
    heads = jax.ShapeDtypeStruct((*shape[:2], shape[2] // 3, width), dtype)
    by_cudnn = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")
    try:
        jax.eval_shape(lambda *heads: jax.vjp(by_cudnn, *heads)[0], heads, heads, heads)
    except (RuntimeError, NotImplementedError, ValueError):  # cuDNN is missing, too old, or refuses the shape
        return False
    return True


def _by_cudnn(qkv: Array) -> Array:
    by_cudnn = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")
    heads = jnp.split(qkv, 3, axis=2)
    return product(lax.platform_dependent(*heads, cuda=by_cudnn, default=jax.nn.dot_product_attention))


def _by_kernel(qkv: Array, *, block: int) -> Array:
    from jepa_jax.models.kernels.fused_attention import fused_attention  # imports Pallas, which takes 0.3 s

    return fused_attention(qkv, block)


def _per_device(fused: Callable[[Array], Array], qkv: Array) -> Array:
    """Applies a kernel, which XLA does not divide: each device attends to its own images."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.size <= 1:
        return fused(qkv)
    split = PartitionSpec(mesh.axis_names)
    return jax.shard_map(fused, in_specs=split, out_specs=split, check_vma=False)(qkv)


def fused_block(length: int, width: int, itemsize: int) -> int:
    """Returns the tokens per block of the kernel on the GPU that the program is for; 0 if its memory is too small."""
    try:
        from jepa_jax.models.kernels.fused_attention import shared_bytes
    except ImportError:  # a version of JAX without Pallas for Triton
        return 0
    limit = MULTIPROCESSORS.get(compute_capability() or (8, 6), MULTIPROCESSORS[8, 6])[1]
    chosen = rows = 0
    for block in FUSED_BLOCKS:
        covered = -(-length // block) * block
        saves = block >= SMALLEST_SAVING and covered**2 <= WORTHWHILE * rows**2
        if shared_bytes(width, block, itemsize) <= limit and (saves or not chosen):
            chosen, rows = block, covered
    return chosen


def store_gradient(x: Array) -> Array:
    """Returns x; on CPUs its gradient is stored once instead of computed again in each reader."""
    return x if forward_mode else _store_gradient(x)


@jax.custom_vjp
def _store_gradient(x: Array) -> Array:
    return x


def _store_gradient_backward(_: None, dx: Array) -> tuple[Array]:
    return (lax.platform_dependent(dx, cpu=materialize, default=lambda dx: dx),)


_store_gradient.defvjp(lambda x: (x, None), _store_gradient_backward)


def _plain(q: Array, k: Array, v: Array, mask: Array | None = None) -> Array:
    return jax.nn.dot_product_attention(q, k, v, mask=None if mask is None else mask[:, None, None, :])


def _in_float32(q: Array, k: Array, v: Array, mask: Array | None = None) -> Array:
    dtype = q.dtype
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    return _plain(q, k, v, mask).astype(dtype)


def _on_cpu(q: Array, k: Array, v: Array, mask: Array | None = None) -> Array:
    batch, length, heads, width = q.shape
    dtype = q.dtype
    q, k, v = (_by_head(x.astype(jnp.float32)) for x in (q * (1 / math.sqrt(width)), k, v))
    bias = jnp.zeros(()) if mask is None else jnp.repeat(jnp.where(mask, 0.0, MASKED_SCORE), heads, axis=0)[:, None, :]
    mixed = _heads(q, k, v, bias).reshape(batch, heads, length, width)
    return jnp.swapaxes(mixed, 1, 2).astype(dtype)


def _by_head(x: Array) -> Array:
    """Returns [b h, n, d] of [b, n, h, d]; as an array of its own, since strided products are half as fast."""
    batch, length, heads, width = x.shape
    return lax.optimization_barrier(jnp.swapaxes(x, 1, 2).reshape(batch * heads, length, width))


@jax.custom_vjp
def _heads(q: Array, k: Array, v: Array, bias: Array) -> Array:
    """Returns softmax(q k' + bias) v of [g, n, d], [g, m, d], [g, m, d] and [g, 1, m] or a number."""
    return _on_all_cores(_product(_weights(q, k, bias), v, 2, 1))


def _weights(q: Array, k: Array, bias: Array) -> Array:
    return jax.nn.softmax(_product(q, k, 2, 2) + bias, axis=-1)


def _heads_forward(q: Array, k: Array, v: Array, bias: Array) -> tuple[Array, tuple[Array, ...]]:
    # The barrier stores the weights once, instead of computing them again in each product.
    weights = lax.optimization_barrier(_weights(q, k, bias))
    out = _on_all_cores(_product(weights, v, 2, 1))
    return out, (q, k, v, weights, out)


def _heads_backward(kept: tuple[Array, ...], dy: Array) -> tuple[Array, Array, Array, None]:
    q, k, v, weights, out = kept
    dy = lax.optimization_barrier(dy)
    dv = _product(weights, dy, 1, 1)
    slope = _product(dy, v, 2, 2) - jnp.sum(dy * out, axis=-1, keepdims=True)
    slope = lax.optimization_barrier(weights * slope)
    return _on_all_cores(_product(slope, k, 2, 1)), _product(slope, q, 1, 1), dv, None


def _on_all_cores(product: Array) -> Array:
    """Returns a batch of finite products as it is, computed by all cores.

    XLA's library (YNN) divides small products of a batch among threads only if there is a reduction in the same kernel.
    """
    return product + 0 * jnp.max(product, axis=-1, keepdims=True)


_heads.defvjp(_heads_forward, _heads_backward)


def _product(a: Array, b: Array, a_axis: int, b_axis: int) -> Array:
    return lax.dot_general(a, b, (((a_axis,), (b_axis,)), ((0,), (0,))))
