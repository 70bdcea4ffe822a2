"""Softmax attention that is fast everywhere, with one meaning: softmax(q k' / sqrt(d)) v for each head.

Which formulation a program holds is settled when it is lowered, as for convolutions. On CPUs heads are batches of plain
matrix products with a gradient that reuses the softmax of the forward pass; on NVIDIA GPUs self-attention is one
fused kernel, the same whether a step is trained or planned; elsewhere it is XLA's.
"""

import math

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec
from jaxtyping import Bool, Float

from jepa_jax.base.scope import Scope
from jepa_jax.models.kernels import forward_mode
from jepa_jax.models.kernels.linear import materialize
from jepa_jax.models.remat import product

FUSED_LENGTH, FUSED_BLOCK = 64, 64  # tokens from which on, and in blocks of which, the kernel for GPUs works
MASKED_SCORE = -1e30  # score of a key that is not attended to; finite, so that rows without any key have no NaN
# The scope in which exported programs are traced, which run without this package.
without_gpu_kernels = Scope("without_gpu_kernels")


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
    return product(lax.platform_dependent(q, k, v, *masks, cpu=_on_cpu, cuda=_on_cuda, default=_plain))


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


def _on_cpu(q: Array, k: Array, v: Array, mask: Array | None = None) -> Array:
    batch, length, heads, width = q.shape
    dtype = q.dtype
    q, k, v = (_by_head(x.astype(jnp.float32)) for x in (q * (1 / math.sqrt(width)), k, v))
    bias = jnp.zeros(()) if mask is None else jnp.repeat(jnp.where(mask, 0.0, MASKED_SCORE), heads, axis=0)[:, None, :]
    mixed = _heads(q, k, v, bias).reshape(batch, heads, length, width)
    return jnp.swapaxes(mixed, 1, 2).astype(dtype)


def _on_cuda(q: Array, k: Array, v: Array, mask: Array | None = None) -> Array:
    """Computes blocks of scores in fast memory (a Triton kernel): the matrix of all scores is never written."""
    if without_gpu_kernels or mask is not None or q.shape != k.shape or q.shape[1] < FUSED_LENGTH:
        return _plain(q, k, v, mask)
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.size <= 1:
        return _fused(q, k, v)
    split = PartitionSpec(mesh.axis_names)  # XLA does not divide a kernel: each device attends to its own images
    return jax.shard_map(_fused, in_specs=(split,) * 3, out_specs=split, check_vma=False)(q, k, v)


def _fused(q: Array, k: Array, v: Array, *, interpret: bool = False) -> Array:
    from jax.experimental.pallas.ops.gpu.attention import BlockSizes, mha

    batch, length, _, width = q.shape
    padding = -length % FUSED_BLOCK
    q, k, v = (jnp.pad(x, ((0, 0), (0, padding), (0, 0), (0, 0))) for x in (q, k, v))
    # Tokens attend to those of their own segment, and padding is another one.
    segments = jnp.broadcast_to(jnp.arange(length + padding) < length, (batch, length + padding)).astype(jnp.int32)
    blocks = BlockSizes(*[FUSED_BLOCK] * 6)
    mixed = mha(q, k, v, segments, sm_scale=1 / math.sqrt(width), block_sizes=blocks, interpret=interpret)
    return mixed[:, :length]


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
