"""Selecting tokens of a sequence."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Integer


def take_tokens(x: Float[Array, "b t d"], index: Integer[Array, "b n"]) -> Float[Array, "b n d"]:
    """Returns the tokens of each sequence at `index`."""
    return jnp.take_along_axis(x, index[..., None], axis=1)
