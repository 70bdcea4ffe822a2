"""A causal transformer as predictor: each block is modulated by the action (AdaLN-zero).

Reference of the modulation: Peebles and Xie, "Scalable Diffusion Models with Transformers", ICCV 2023.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jepa_jax.losses.jepa import standardised
from jepa_jax.models.kernels.linear import Linear, linear
from jepa_jax.models.kernels.mlp import mlp

Sequence = Float[Array, "b t d"]


class ModulatedBlock(nnx.Module):
    """Causal attention and a perceptron, whose norms are shifted and scaled, and whose results are gated, by actions.

    The layer that reads the actions starts at zero, so that a new block is the identity.
    """

    def __init__(
        self, width: int, heads: int, head_width: int, mlp_width: int, *, dropout: float, dtype: Any, rngs: nnx.Rngs
    ):
        self.heads = heads
        zeros = nnx.initializers.zeros_init()
        self.modulation = Linear(width, 6 * width, kernel_init=zeros, bias_init=zeros, dtype=dtype, rngs=rngs)
        self.qkv = linear(width, 3 * heads * head_width, dtype, rngs)
        self.out = linear(heads * head_width, width, dtype, rngs)
        self.up, self.down = linear(width, mlp_width, dtype, rngs), linear(mlp_width, width, dtype, rngs)
        self.drop = nnx.Dropout(dropout, rngs=nnx.Rngs(dropout=rngs.params())) if dropout else None

    def __call__(self, x: Sequence, condition: Sequence, *, train: bool) -> Sequence:
        parts = jnp.split(self.modulation(jax.nn.silu(condition)), 6, axis=-1)
        shift1, scale1, gate1, shift2, scale2, gate2 = parts
        x = x + gate1 * self._dropped(self._attention(_modulated(x, shift1, scale1)), train)
        return x + gate2 * self._dropped(mlp(_modulated(x, shift2, scale2), self.up, self.down), train)

    def _attention(self, x: Sequence) -> Sequence:
        batch, length, _ = x.shape
        q, k, v = jnp.split(self.qkv(x).reshape(batch, length, 3 * self.heads, -1), 3, axis=2)
        return self.out(jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(batch, length, -1))

    def _dropped(self, x: Sequence, train: bool) -> Sequence:
        return self.drop(x) if train and self.drop is not None else x


class CausalPredictor(nnx.Module):
    """Maps the last latents and actions, at most `memory` of them, to the next latent after each."""

    def __init__(
        self,
        latents: int,
        actions: int,
        *,
        memory: int,
        depth: int,
        heads: int,
        head_width: int,
        mlp_width: int,
        dropout: float = 0.0,
        dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        self.memory = memory
        self.position = nnx.Param(0.02 * jax.random.normal(rngs.params(), (memory, latents)), decay=False)
        self.embed_up, self.embed_down = (
            linear(actions, 4 * latents, dtype, rngs),
            linear(4 * latents, latents, dtype, rngs),
        )
        sizes = (latents, heads, head_width, mlp_width)
        self.blocks = nnx.List([ModulatedBlock(*sizes, dropout=dropout, dtype=dtype, rngs=rngs) for _ in range(depth)])
        self.out = linear(latents, latents, dtype, rngs)

    def __call__(self, latents: Sequence, actions: Float[Array, "b t a"], *, train: bool = False) -> Sequence:
        """Returns what follows each latent under its action; no output depends on what comes later."""
        condition = self.embed_down(jax.nn.silu(self.embed_up(actions)))
        x = latents + self.position[: latents.shape[1]].astype(latents.dtype)
        for block in self.blocks:
            x = block(x, condition, train=train)
        return self.out(standardised(x).astype(x.dtype))


def _modulated(x: Sequence, shift: Sequence, scale: Sequence) -> Sequence:
    return standardised(x).astype(x.dtype) * (1 + scale) + shift
