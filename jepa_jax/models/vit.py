"""Vision transformer: pre-norm, exact GELU; any subset of an image's patches can be encoded.

Positions are learned or fixed sines and cosines of row and column. A CLS token is optional.
"""

from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jepa_jax.models.tokens import take_tokens

SIZES = {  # width, depth, heads
    "vit_tiny": (192, 12, 3),
    "vit_small": (384, 12, 6),
    "vit_base": (768, 12, 12),
}


class Attention(nnx.Module):
    """Multi-head self-attention with one fused projection for queries, keys and values."""

    def __init__(self, width: int, heads: int, *, dtype, rngs: nnx.Rngs):
        self.heads = heads
        self.qkv = linear(width, 3 * width, dtype, rngs)
        self.out = linear(width, width, dtype, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        batch, length, width = x.shape
        q, k, v = jnp.split(self.qkv(x).reshape(batch, length, 3 * self.heads, width // self.heads), 3, axis=2)
        return self.out(jax.nn.dot_product_attention(q, k, v).reshape(batch, length, width))


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, width: int, heads: int, *, mlp_ratio: int = 4, dtype, rngs: nnx.Rngs):
        self.norm1 = layer_norm(width, dtype, rngs)
        self.attention = Attention(width, heads, dtype=dtype, rngs=rngs)
        self.norm2 = layer_norm(width, dtype, rngs)
        self.up = linear(width, mlp_ratio * width, dtype, rngs)
        self.down = linear(mlp_ratio * width, width, dtype, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm1(x))
        return x + self.down(jax.nn.gelu(self.up(self.norm2(x)), approximate=False))


class ViT(nnx.Module):
    """Images [B, H, W, 3] -> features [B, width]: the CLS token, or the mean over patches."""

    def __init__(
        self,
        width: int,
        depth: int,
        heads: int,
        *,
        image_size: int,
        patch_size: int,
        pool: str = "cls",
        cls_token: bool = True,
        positions: str = "learned",
        dtype=jnp.float32,
        remat: bool = False,
        rngs: nnx.Rngs,
    ):
        self.image_size, self.patch_size, self.pool, self.remat = image_size, patch_size, pool, remat
        self.feature_dim = width
        self.grid = image_size // patch_size
        self.num_cls = int(cls_token)
        initial = nnx.initializers.truncated_normal(0.02)
        self.patch_embed = linear(3 * patch_size**2, width, dtype, rngs)
        if cls_token:
            self.cls_token = nnx.Param(initial(rngs.params(), (1, 1, width)))
        learned = (1, self.grid**2 + self.num_cls, width)
        self.position = nnx.Param(initial(rngs.params(), learned)) if positions == "learned" else None
        self.blocks = nnx.List([Block(width, heads, dtype=dtype, rngs=rngs) for _ in range(depth)])
        self.norm = layer_norm(width, dtype, rngs)

    def embed(self, images: jax.Array, keep: jax.Array | None = None) -> jax.Array:
        """Patch tokens with positions, without CLS: [B, n, width], of all patches or of those in `keep` [B, n]."""
        patches = patchify(images, self.patch_size)
        positions = jnp.broadcast_to(self._positions()[:, self.num_cls :], (1, self.grid**2, self.feature_dim))
        if keep is not None:  # dropped before anything is computed of them
            patches = take_tokens(patches, keep)
            positions = take_tokens(jnp.broadcast_to(positions, (len(images), *positions.shape[1:])), keep)
        tokens = self.patch_embed(patches)
        return tokens + positions.astype(tokens.dtype)

    def encode(self, tokens: jax.Array, *, normalised: bool = True) -> jax.Array:
        """Outputs for embedded tokens, those of CLS in front if there is one: [B, num_cls + n, width]."""
        x = tokens
        if self.num_cls:
            cls = (self.cls_token[...] + self._positions()[:, :1]).astype(tokens.dtype)
            x = jnp.concatenate([jnp.broadcast_to(cls, (tokens.shape[0], *cls.shape[1:])), tokens], axis=1)
        x = run_blocks(self.blocks, x, remat=self.remat)
        return self.norm(x) if normalised else x

    def patches(self, images: jax.Array, keep: jax.Array | None = None, *, normalised: bool = True) -> jax.Array:
        """Outputs of the patches alone: [B, n, width]."""
        return self.encode(self.embed(images, keep), normalised=normalised)[:, self.num_cls :]

    def __call__(self, images: jax.Array, *, train: bool = False, normalised: bool = True) -> jax.Array:
        del train  # no dropout, no batch statistics
        return self.pooled(self.encode(self.embed(images), normalised=normalised))

    def pooled(self, outputs: jax.Array) -> jax.Array:
        """One vector an image from what `encode` gave: [B, width]."""
        return outputs[:, 0] if self.pool == "cls" else jnp.mean(outputs[:, self.num_cls :], axis=1)

    def _positions(self) -> jax.Array:
        """[1, num_cls + grid^2, width]."""
        if self.position is not None:
            return self.position[...]
        return jnp.asarray(sincos_positions(self.grid, self.feature_dim, leading=self.num_cls))[None]


def run_blocks(blocks: Iterable[Block], x: jax.Array, *, remat: bool) -> jax.Array:
    """Blocks one after the other; with `remat` the backward pass recomputes the inside of each."""
    run = nnx.remat(lambda block, x: block(x)) if remat else (lambda block, x: block(x))
    for block in blocks:
        x = run(block, x)
    return x


def sincos_positions(grid: int, width: int, leading: int = 0) -> np.ndarray:
    """Fixed positions [leading + grid^2, width]: sines and cosines of the row, then of the column; zeros for CLS."""
    frequencies = 1 / 10_000 ** (np.arange(width // 4) / (width // 4))
    angles = np.arange(grid)[:, None] * frequencies  # [grid, width / 4]
    axis = np.concatenate([np.sin(angles), np.cos(angles)], axis=1)  # [grid, width / 2]
    rows, columns = np.repeat(axis, grid, axis=0), np.tile(axis, (grid, 1))
    table = np.concatenate([rows, columns], axis=1).astype(np.float32)
    return np.pad(table, ((leading, 0), (0, 0)))


def patchify(images: jax.Array, size: int) -> jax.Array:
    """[B, H, W, C] -> [B, (H / size) (W / size), size size C], row by row."""
    batch, height, width, channels = images.shape
    x = images.reshape(batch, height // size, size, width // size, size, channels)
    return x.transpose(0, 1, 3, 2, 4, 5).reshape(batch, -1, size * size * channels)


def unpatchify(patches: jax.Array, size: int) -> jax.Array:
    """The inverse of `patchify` for square images of three channels."""
    batch, tokens, _ = patches.shape
    grid = round(tokens**0.5)
    x = patches.reshape(batch, grid, grid, size, size, 3)
    return x.transpose(0, 1, 3, 2, 4, 5).reshape(batch, grid * size, grid * size, 3)


def linear(inputs: int, outputs: int, dtype, rngs: nnx.Rngs) -> nnx.Linear:
    """A dense layer with float32 parameters, computing in `dtype`.

    Its first weights keep the size of what passes through at any width. The usual fixed deviation of 0.02 is meant for
    widths near 768: in a narrow ViT it leaves tokens that are nearly all position, predicted without looking.
    """
    return nnx.Linear(inputs, outputs, dtype=dtype, kernel_init=nnx.initializers.xavier_uniform(), rngs=rngs)


def layer_norm(width: int, dtype, rngs: nnx.Rngs) -> nnx.LayerNorm:
    return nnx.LayerNorm(width, epsilon=1e-6, dtype=dtype, rngs=rngs)
