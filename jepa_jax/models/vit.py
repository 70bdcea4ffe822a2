"""Vision transformer: pre-norm, learned positions, exact GELU; tokens can be embedded, dropped, encoded separately."""

import jax
import jax.numpy as jnp
from flax import nnx

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
        dtype=jnp.float32,
        remat: bool = False,
        rngs: nnx.Rngs,
    ):
        self.patch_size, self.pool, self.remat = patch_size, pool, remat
        self.feature_dim = width
        grid = image_size // patch_size
        self.patch_embed = linear(3 * patch_size**2, width, dtype, rngs)
        initial = nnx.initializers.truncated_normal(0.02)
        self.cls_token = nnx.Param(initial(rngs.params(), (1, 1, width)))
        self.position = nnx.Param(initial(rngs.params(), (1, grid**2 + 1, width)))
        self.blocks = nnx.List([Block(width, heads, dtype=dtype, rngs=rngs) for _ in range(depth)])
        self.norm = layer_norm(width, dtype, rngs)

    def embed(self, images: jax.Array) -> jax.Array:
        """Patch tokens with positions, without CLS: [B, grid^2, width]."""
        tokens = self.patch_embed(patchify(images, self.patch_size))
        return tokens + self.position[:, 1:].astype(tokens.dtype)

    def encode(self, tokens: jax.Array) -> jax.Array:
        """Normalised outputs of any subset of tokens with CLS in front: [B, 1 + n, width]."""
        cls = (self.cls_token[...] + self.position[:, :1]).astype(tokens.dtype)
        x = jnp.concatenate([jnp.broadcast_to(cls, (tokens.shape[0], *cls.shape[1:])), tokens], axis=1)
        run = nnx.remat(lambda block, x: block(x)) if self.remat else (lambda block, x: block(x))
        for block in self.blocks:
            x = run(block, x)
        return self.norm(x)

    def __call__(self, images: jax.Array, *, train: bool = False) -> jax.Array:
        del train  # no dropout, no batch statistics
        x = self.encode(self.embed(images))
        return x[:, 0] if self.pool == "cls" else jnp.mean(x[:, 1:], axis=1)


def patchify(images: jax.Array, size: int) -> jax.Array:
    """[B, H, W, C] -> [B, (H / size) (W / size), size size C], row by row."""
    batch, height, width, channels = images.shape
    x = images.reshape(batch, height // size, size, width // size, size, channels)
    return x.transpose(0, 1, 3, 2, 4, 5).reshape(batch, -1, size * size * channels)


def linear(inputs: int, outputs: int, dtype, rngs: nnx.Rngs) -> nnx.Linear:
    """A dense layer with float32 parameters, computing in `dtype`, initialised as ViTs are."""
    return nnx.Linear(inputs, outputs, dtype=dtype, kernel_init=nnx.initializers.truncated_normal(0.02), rngs=rngs)


def layer_norm(width: int, dtype, rngs: nnx.Rngs) -> nnx.LayerNorm:
    return nnx.LayerNorm(width, epsilon=1e-6, dtype=dtype, rngs=rngs)
