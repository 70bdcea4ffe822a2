"""A narrow transformer that turns what an encoder saw of an image into tokens at other places of it.

I-JEPA's and H-JEPA's predictor, and the decoder of a masked autoencoder.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from jepa_jax.models.tokens import take_tokens
from jepa_jax.models.vit import Block, layer_norm, linear, run_blocks, sincos_positions


class Predictor(nnx.Module):
    """Context tokens [B, n, inputs] and places -> outputs [B, m, outputs] at the asked places.

    A context as wide as the predictor enters it unchanged. With `mark_context` a learned vector is added to every
    context token, the counterpart of the mask token that stands at the asked places.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        width: int,
        depth: int,
        heads: int,
        grid: int,
        mark_context: bool = False,
        dtype=jnp.float32,
        remat: bool = False,
        rngs: nnx.Rngs,
    ):
        self.grid, self.width, self.remat = grid, width, remat
        initial = nnx.initializers.truncated_normal(0.02)
        self.embed = None if inputs == width else linear(inputs, width, dtype, rngs)
        self.mask_token = nnx.Param(initial(rngs.params(), (1, 1, width)))
        self.context_token = nnx.Param(initial(rngs.params(), (1, 1, width))) if mark_context else None
        self.blocks = nnx.List([Block(width, heads, dtype=dtype, rngs=rngs) for _ in range(depth)])
        self.norm = layer_norm(width, dtype, rngs)
        self.out = linear(width, outputs, dtype, rngs)

    def __call__(
        self, context: jax.Array, context_at: jax.Array, asked_at: jax.Array, *, with_context: bool = False
    ) -> jax.Array:
        """Outputs at `asked_at` [B, m]; `with_context` puts those at `context_at` [B, n] in front."""
        batch, length = context_at.shape
        positions = jnp.broadcast_to(sincos_positions(self.grid, self.width), (batch, self.grid**2, self.width))
        if self.embed is not None:
            context = self.embed(context)
        if self.context_token is not None:
            context = context + self.context_token[...].astype(context.dtype)
        context = context + take_tokens(positions, context_at).astype(context.dtype)
        asked = (self.mask_token[...] + take_tokens(positions, asked_at)).astype(context.dtype)
        x = run_blocks(self.blocks, jnp.concatenate([context, asked], axis=1), remat=self.remat)
        return self.out(self.norm(x if with_context else x[:, length:]))
