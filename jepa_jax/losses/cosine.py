"""Cosine similarity: what methods that predict the direction of an embedding compare."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Scalar


def unit(x: Float[Array, "... d"]) -> Float[Array, "... d"]:
    """Returns vectors of length 1 along the last axis; a zero vector stays zero."""
    return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + 1e-12)


def mean_cosine(a: Float[Array, "b d"], b: Float[Array, "b d"]) -> Scalar:
    """Returns the mean over the batch of the cosine between a and b."""
    return jnp.mean(jnp.sum(unit(a) * unit(b), axis=-1))


def crossed_cosine(predicted: Sequence[Float[Array, "b d"]], wanted: Sequence[Float[Array, "b d"]]) -> Scalar:
    """Returns the mean cosine of what is predicted from each of two views with what is wanted of the other one."""
    return 0.5 * (mean_cosine(predicted[0], wanted[1]) + mean_cosine(predicted[1], wanted[0]))
