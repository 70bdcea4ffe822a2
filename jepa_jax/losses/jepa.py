"""The loss of a masked JEPA: predicted tokens against the standardised tokens of a target encoder."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


def smooth_l1(error: Float[Array, "..."], beta: float = 1.0) -> Float[Array, "..."]:
    """Returns e^2 / (2 beta) where |e| < beta and |e| - beta / 2 elsewhere."""
    size = jnp.abs(error)
    return jnp.where(size < beta, 0.5 * jnp.square(error) / beta, size - 0.5 * beta)


def standardised(tokens: Float[Array, "... d"], eps: float = 1e-6) -> Float[Array, "... d"]:
    """Returns a layer norm over the last axis without parameters, in float32."""
    tokens = tokens.astype(jnp.float32)
    mean = jnp.mean(tokens, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(tokens - mean), axis=-1, keepdims=True)
    return (tokens - mean) * lax.rsqrt(variance + eps)


def prediction_loss(
    predicted: Float[Array, "b n d"], target: Float[Array, "b n d"], weights: Float[Array, "b n"] | None = None
) -> Float[Array, ""]:
    """Returns the mean smooth-L1 distance over tokens; `weights` say how much each token counts."""
    each = jnp.mean(smooth_l1(predicted.astype(jnp.float32) - target), axis=-1)
    return jnp.mean(each) if weights is None else jnp.sum(weights * each) / jnp.sum(weights)
