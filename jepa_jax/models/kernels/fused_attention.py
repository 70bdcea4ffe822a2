"""Self-attention on NVIDIA GPUs as one kernel per pass (Pallas on Triton), which never writes the matrix of scores.

Queries, keys and values are read where their joined projection has put them, and their gradients go into one array of
the same layout: nothing is split, joined or padded in memory. What a block holds beyond the last token, or beyond the
width of a head, is masked when it is read.

Reference: Dao, "FlashAttention-2", 2023.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Float

from jepa_jax.models.remat import product, statistic
from jepa_jax.runtime.hardware import pallas_target

MASKED_SCORE = -1e30
QUERY, KEY, VALUE = range(3)  # order of the heads in the joined projection
STAGES = 2  # loads under way at a time
WIDE_HEAD = 64  # beyond, a block has more threads


def shared_bytes(width: int, block: int, itemsize: int) -> int:
    """Returns the shared memory of a block of the backward pass: three arrays of heads and one of scores."""
    return block * ((3 * padded_width(width) + block) * itemsize + 4)


def padded_width(width: int) -> int:
    """Returns the numbers per head in a kernel: Triton's arrays are powers of two."""
    return 1 << (width - 1).bit_length()


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def fused_attention(
    qkv: Float[Array, "b n heads d"], block: int, interpret: bool = False
) -> Float[Array, "b n heads/3 d"]:
    """Returns attention outputs of queries, keys and values, whose heads stand behind each other in `qkv`.

    Args:
      block: tokens per block of scores, a power of two of at least 16.
      interpret: computes on any platform, operation by operation.
    """
    return _forward(qkv, block, interpret)[0]


def _fused_forward(qkv: Array, block: int, interpret: bool) -> tuple[Array, tuple[Array, ...]]:
    out, lse = _forward(qkv, block, interpret)
    out, lse = product(out), statistic(lse)  # named, so that light remat does not run the kernel again
    return out, (qkv, out, lse)


def _fused_backward(block: int, interpret: bool, kept: tuple[Array, ...], dout: Array) -> tuple[Array]:
    qkv, out, lse = kept
    return (_backward(qkv, out, lse, dout, block, interpret),)


fused_attention.defvjp(_fused_forward, _fused_backward)


class _Blocks:
    """Sizes of a call, and the parts of arrays that a block reads and writes."""

    def __init__(self, shape: tuple[int, ...], block: int):
        self.batch, self.length, heads, self.width = shape
        self.heads, self.block, self.padded = heads // 3, block, padded_width(self.width)
        self.count = -(-self.length // block)
        self.rows = self.count * block
        self.scale = math.log2(math.e) / math.sqrt(self.width)  # of scores, as powers of two are computed

    def call(self, kernel: Any, name: str, **how: Any) -> Any:
        compute = pl.pallas_call(
            functools.partial(kernel, self),
            grid=(self.count, self.batch, self.heads),
            compiler_params=triton.CompilerParams(num_warps=4 if self.width <= WIDE_HEAD else 8, num_stages=STAGES),
            name=f"{name}_{self.block}",
            **how,
        )

        def on_target(*arrays: Array) -> Any:
            with pallas_target():
                return compute(*arrays)

        return on_target

    def whole(self, heads: int) -> pl.BlockSpec:
        """All tokens and heads of an image."""
        return pl.BlockSpec((None, self.rows, heads, self.padded), lambda i, image, head: (image, 0, 0, 0))

    def part(self, heads: int) -> pl.BlockSpec:
        """The tokens of a block, all heads."""
        return pl.BlockSpec((None, self.block, heads, self.padded), lambda i, image, head: (image, i, 0, 0))

    def row_of_head(self) -> pl.BlockSpec:
        """One number per token of a head."""
        return pl.BlockSpec((None, None, self.rows), lambda i, image, head: (image, head, 0))

    def span(self, i: Any) -> Any:
        return pl.ds(i * self.block, self.block)

    def inside(self, i: Any) -> Array:
        """Returns which numbers of a block are tokens and within the width: [block, padded]."""
        columns = jnp.arange(self.padded) < self.width
        return self.is_token(i)[:, None] & columns[None, :]

    def is_token(self, i: Any) -> Array:
        return i * self.block + jnp.arange(self.block) < self.length

    def load(self, ref: Any, i: Any, head: Any) -> Array:
        return triton.load(ref.at[self.span(i), head, :], mask=self.inside(i), other=0.0)

    def scores(self, q: Array, k: Array, keys: Any) -> Array:
        """Returns scores as exponents of two, those of keys beyond the last token masked: [block, block]."""
        scores = triton.dot(q, k.T) * self.scale
        return scores if self.rows == self.length else jnp.where(self.is_token(keys)[None, :], scores, MASKED_SCORE)


def _forward(qkv: Array, block: int, interpret: bool) -> tuple[Array, Array]:
    """Returns outputs and the logarithms (base 2) of the sums of exponentials."""
    sizes = _Blocks(qkv.shape, block)
    kernel = sizes.call(
        _forward_kernel,
        "attention_forward",
        in_specs=[sizes.whole(3 * sizes.heads)],
        out_specs=[
            sizes.part(sizes.heads),
            pl.BlockSpec((None, None, block), lambda i, image, head: (image, head, i)),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((sizes.batch, sizes.length, sizes.heads, sizes.width), qkv.dtype),
            jax.ShapeDtypeStruct((sizes.batch, sizes.heads, sizes.rows), jnp.float32),
        ],
        interpret=interpret,
    )
    if interpret:
        return kernel(qkv)
    # What a process with GPUs computes on its CPU is no kernel.
    return lax.platform_dependent(
        qkv, cuda=lambda qkv: tuple(kernel(qkv)), default=functools.partial(_plain_forward, sizes)
    )


def _plain_forward(sizes: _Blocks, qkv: Array) -> tuple[Array, Array]:
    q, k, v = jnp.split(qkv.astype(jnp.float32), 3, axis=2)
    scores = sizes.scale * jnp.einsum("bnhd,bmhd->bhnm", q, k)
    lse = jax.nn.logsumexp(scores * math.log(2), axis=-1) * math.log2(math.e)
    out = jnp.einsum("bhnm,bmhd->bnhd", jnp.exp2(scores - lse[..., None]), v)
    return out.astype(qkv.dtype), jnp.pad(lse, ((0, 0), (0, 0), (0, sizes.rows - sizes.length)))


def _forward_kernel(sizes: _Blocks, qkv: Any, out: Any, lse: Any) -> None:
    own, head = pl.program_id(0), pl.program_id(2)
    q = sizes.load(qkv, own, QUERY * sizes.heads + head)

    def add(i: Any, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        """Adds a block of keys; `top` is the largest score so far, to which sums are relative."""
        mixed, total, top = carry
        k, v = (sizes.load(qkv, i, part * sizes.heads + head) for part in (KEY, VALUE))
        scores = sizes.scores(q, k, i)
        new_top = jnp.maximum(top, jnp.max(scores, axis=-1))
        weights, fade = jnp.exp2(scores - new_top[:, None]), jnp.exp2(top - new_top)
        mixed = mixed * fade[:, None] + triton.dot(weights.astype(v.dtype), v)
        return mixed, total * fade + jnp.sum(weights, axis=-1), new_top

    nothing = jnp.zeros((sizes.block, sizes.padded), jnp.float32), jnp.zeros(sizes.block, jnp.float32)
    mixed, total, top = lax.fori_loop(0, sizes.count, add, (*nothing, jnp.full(sizes.block, -jnp.inf, jnp.float32)))
    lse[...] = top + jnp.log2(total)
    triton.store(out.at[:, head, :], (mixed / total[:, None]).astype(out.dtype), mask=sizes.inside(own))


def _backward(qkv: Array, out: Array, lse: Array, dout: Array, block: int, interpret: bool) -> Array:
    """Returns the gradient of `qkv`."""
    sizes = _Blocks(qkv.shape, block)
    delta = jnp.sum(out.astype(jnp.float32) * dout.astype(jnp.float32), axis=-1)  # [b, n, h]
    delta = jnp.pad(jnp.swapaxes(delta, 1, 2), ((0, 0), (0, 0), (0, sizes.rows - sizes.length)))
    kernel = sizes.call(
        _backward_kernel,
        "attention_backward",
        in_specs=[sizes.whole(3 * sizes.heads), sizes.whole(sizes.heads), sizes.row_of_head(), sizes.row_of_head()],
        out_specs=sizes.part(3 * sizes.heads),
        out_shape=jax.ShapeDtypeStruct(qkv.shape, qkv.dtype),
        interpret=interpret,
    )
    if interpret:
        return kernel(qkv, dout, lse, delta)

    def plain(qkv: Array, dout: Array, lse: Array, delta: Array) -> Array:
        del lse, delta
        return jax.vjp(lambda qkv: _plain_forward(sizes, qkv)[0], qkv)[1](dout)[0]

    return lax.platform_dependent(qkv, dout, lse, delta, cuda=kernel, default=plain)


def _backward_kernel(sizes: _Blocks, qkv: Any, dout: Any, lse: Any, delta: Any, dqkv: Any) -> None:
    """Writes the gradients of a block of keys and values, then those of the block of queries of the same tokens."""
    own, head = pl.program_id(0), pl.program_id(2)

    def load(part: int, i: Any) -> Array:
        return sizes.load(qkv, i, part * sizes.heads + head)

    def store(part: int, gradient: Array) -> None:
        place = dqkv.at[:, part * sizes.heads + head, :]
        triton.store(place, gradient.astype(dqkv.dtype), mask=sizes.inside(own))

    def weights_and_slope(q: Array, k: Array, v: Array, do: Array, queries: Any, keys: Any) -> tuple[Array, Array]:
        """Returns softmax weights and the gradient of scores, in the type of the products."""
        at = sizes.span(queries)
        weights = jnp.exp2(sizes.scores(q, k, keys) - lse[at][:, None])
        slope = weights * (triton.dot(do, v.T) - delta[at][:, None])
        return weights.astype(do.dtype), slope.astype(q.dtype)

    k, v = load(KEY, own), load(VALUE, own)

    def add_queries(i: Any, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        dk, dv = carry
        q, do = load(QUERY, i), sizes.load(dout, i, head)
        weights, slope = weights_and_slope(q, k, v, do, i, own)
        return dk + triton.dot(slope.T, q), dv + triton.dot(weights.T, do)

    nothing = jnp.zeros((sizes.block, sizes.padded), jnp.float32)
    dk, dv = lax.fori_loop(0, sizes.count, add_queries, (nothing, nothing))
    store(KEY, dk * (1 / math.sqrt(sizes.width)))
    store(VALUE, dv)
    q, do = load(QUERY, own), sizes.load(dout, own, head)

    def add_keys(i: Any, dq: Array) -> Array:
        k, v = load(KEY, i), load(VALUE, i)
        return dq + triton.dot(weights_and_slope(q, k, v, do, own, i)[1], k)

    store(QUERY, lax.fori_loop(0, sizes.count, add_keys, nothing) * (1 / math.sqrt(sizes.width)))
