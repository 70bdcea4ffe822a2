"""Softmax attention that is fast everywhere, with one meaning: softmax(q k' / sqrt(d)) v for each head.

Which formulation a program holds is settled when it is lowered, as for convolutions. On CPUs heads are batches of plain
matrix products with a gradient that reuses the softmax of the forward pass; on NVIDIA GPUs from Ampere on
self-attention is one fused kernel, the same whether a step is trained or planned; elsewhere it is XLA's.
"""

import functools
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
from jepa_jax.runtime.hardware import MULTIPROCESSORS, compute_capability

FUSED_LENGTH = 64  # tokens from which on the kernel for GPUs is used
FUSED_BLOCKS = (64, 32, 16)  # tokens of a block of scores in it, the fastest first
AMPERE = (8, 0)  # compute capability of the first GPUs that have bfloat16 and that Triton compiles for
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
    on_cuda = _plain
    if (compute_capability() or AMPERE) < AMPERE:
        on_cuda = _in_float32
    elif not (without_gpu_kernels or masks or q.shape != k.shape or q.shape[1] < FUSED_LENGTH):
        # A new function for each call: JAX would reuse the trace of another GPU.
        if block := fused_block(q.shape[-1], q.dtype.itemsize):
            on_cuda = functools.partial(_on_cuda, block=block)
    return product(lax.platform_dependent(q, k, v, *masks, cpu=_on_cpu, cuda=on_cuda, default=_plain))


def fused_block(width: int, itemsize: int) -> int:
    """Returns the tokens per block of the kernel on the GPU that the program is for; 0 if its memory is too small.

    The kernel of the backward pass holds three blocks of heads and one of scores in shared memory.
    """
    capability = compute_capability() or (8, 6)
    padded = 1 << (width - 1).bit_length()  # Triton's arrays are powers of two
    limit = MULTIPROCESSORS.get(capability, MULTIPROCESSORS[8, 6])[1]
    fitting = [block for block in FUSED_BLOCKS if block * ((3 * padded + block) * itemsize + 4) <= limit]
    return next(iter(fitting), 0)


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


def _on_cuda(q: Array, k: Array, v: Array, *, block: int) -> Array:
    """Computes blocks of scores in fast memory (a Triton kernel): the matrix of all scores is never written."""
    mesh = jax.sharding.get_abstract_mesh()
    fused = functools.partial(_fused, block=block)
    if mesh.size <= 1:
        return fused(q, k, v)
    split = PartitionSpec(mesh.axis_names)  # XLA does not divide a kernel: each device attends to its own images
    return jax.shard_map(fused, in_specs=(split,) * 3, out_specs=split, check_vma=False)(q, k, v)


def _fused(q: Array, k: Array, v: Array, *, block: int, interpret: bool = False) -> Array:
    from jax.experimental.pallas.ops.gpu.attention import BlockSizes, mha

    batch, length, _, width = q.shape
    padding = -length % block
    q, k, v = (jnp.pad(x, ((0, 0), (0, padding), (0, 0), (0, 0))) for x in (q, k, v))
    # Tokens attend to those of their own segment, and padding is another one.
    segments = jnp.broadcast_to(jnp.arange(length + padding) < length, (batch, length + padding)).astype(jnp.int32)
    blocks = BlockSizes(*[block] * 6)
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
