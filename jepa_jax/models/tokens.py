"""Selecting tokens of a sequence."""

import jax
import jax.numpy as jnp


def take_tokens(x: jax.Array, index: jax.Array) -> jax.Array:
    """Tokens [B, n, D] of x [B, T, D] at index [B, n]."""
    return jnp.take_along_axis(x, index[..., None], axis=1)
