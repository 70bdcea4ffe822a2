"""A transformer that predicts tokens at some places of an image from encoder outputs at others.

It is the predictor of I-JEPA and H-JEPA and the decoder of a masked autoencoder.
"""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Integer

from jepa_jax.models.kernels.linear import linear
from jepa_jax.models.kernels.norm import LayerNorm
from jepa_jax.models.positions import sincos_positions
from jepa_jax.models.tokens import take_tokens
from jepa_jax.models.vit import DEFAULT_OPTIONS, Block, BlockOptions, run_blocks


class Predictor(nnx.Module):
    """Maps context tokens and their places to outputs at the places asked for.

    A context as wide as the predictor enters it unchanged. With `mark_context` a learned vector is added to every
    context token, the counterpart of the mask token at the places asked for. With `stored_positions`, positions are
    variables to be loaded, the first of them that of leading tokens, instead of sines and cosines.
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
        stored_positions: bool = False,
        options: BlockOptions = DEFAULT_OPTIONS,
        dtype: Any = jnp.float32,
        remat: str = "none",
        rngs: nnx.Rngs,
    ):
        self.grid, self.width, self.remat = grid, width, remat
        initial = nnx.initializers.truncated_normal(0.02)
        self.embed = None if inputs == width else linear(inputs, width, dtype, rngs)
        token, table = (1, 1, width), (1, 1 + grid**2, width)
        self.mask_token = nnx.Param(initial(rngs.params(), token), decay=False)
        self.context_token = nnx.Param(initial(rngs.params(), token), decay=False) if mark_context else None
        self.position = nnx.Param(jnp.zeros(table), decay=False) if stored_positions else None
        self.blocks = nnx.List([Block(width, heads, options=options, dtype=dtype, rngs=rngs) for _ in range(depth)])
        self.norm = LayerNorm(width, epsilon=options.norm_eps, dtype=dtype, rngs=rngs)
        self.out = linear(width, outputs, dtype, rngs)

    def __call__(
        self,
        context: Float[Array, "b n inputs"],
        context_at: Integer[Array, "b n"],
        asked_at: Integer[Array, "b m"],
        *,
        leading: Float[Array, "b l inputs"] | None = None,
        with_context: bool = False,
    ) -> Float[Array, "b k outputs"]:
        """Returns outputs at `asked_at`; `with_context` puts those at `context_at` in front.

        Args:
          leading: tokens without a place, such as CLS, that are read beside the context.
        """
        batch, length = context_at.shape
        leading_position, positions = self._positions()
        positions = jnp.broadcast_to(positions, (batch, *positions.shape[1:]))
        skipped = 0 if leading is None else leading.shape[1]
        if leading is not None:
            context = jnp.concatenate([leading, context], axis=1)
        if self.embed is not None:
            context = self.embed(context)
        if self.context_token is not None:
            context = context + self.context_token[...].astype(context.dtype)
        of_leading = jnp.broadcast_to(leading_position, (batch, skipped, self.width))
        places = jnp.concatenate([of_leading, take_tokens(positions, context_at)], axis=1)
        context = context + places.astype(context.dtype)
        asked = (self.mask_token[...] + take_tokens(positions, asked_at)).astype(context.dtype)
        x = run_blocks(self.blocks, jnp.concatenate([context, asked], axis=1), remat=self.remat)
        return self.out(self.norm(x[:, skipped + (0 if with_context else length) :]))

    def _positions(self) -> tuple[Float[Array, "1 1 d"], Float[Array, "1 places d"]]:
        """Returns the position of leading tokens, and those of all places."""
        if self.position is not None:
            return self.position[:, :1], self.position[:, 1:]
        return jnp.zeros((1, 1, self.width)), jnp.asarray(sincos_positions(self.grid, self.width))[None]
