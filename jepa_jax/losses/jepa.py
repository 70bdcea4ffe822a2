"""What a masked JEPA compares: predicted tokens with the normalised tokens of a target encoder."""

import jax
import jax.numpy as jnp


def smooth_l1(error: jax.Array, beta: float = 1.0) -> jax.Array:
    """Elementwise: e^2 / (2 beta) below `beta`, |e| - beta / 2 above."""
    size = jnp.abs(error)
    return jnp.where(size < beta, 0.5 * jnp.square(error) / beta, size - 0.5 * beta)


def standardised(tokens: jax.Array, eps: float = 1e-6) -> jax.Array:
    """Layer norm over the last axis without parameters, in float32."""
    tokens = tokens.astype(jnp.float32)
    mean = jnp.mean(tokens, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(tokens - mean), axis=-1, keepdims=True)
    return (tokens - mean) * jax.lax.rsqrt(variance + eps)


def prediction_loss(predicted: jax.Array, target: jax.Array, weights: jax.Array | None = None) -> jax.Array:
    """Mean smooth-L1 over tokens [B, n, D]; `weights` [B, n] say how much a token counts."""
    each = jnp.mean(smooth_l1(predicted.astype(jnp.float32) - target), axis=-1)
    return jnp.mean(each) if weights is None else jnp.sum(weights * each) / jnp.sum(weights)
