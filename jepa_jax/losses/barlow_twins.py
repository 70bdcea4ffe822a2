"""Barlow Twins: the cross-correlation between the dimensions of two views becomes the identity.

Reference: Zbontar et al., "Barlow Twins: Self-Supervised Learning via Redundancy Reduction", ICML 2021. Statistics are
taken over the batch axis as the compiled program sees it: under `jit` with a sharded batch that is the global batch.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Scalar


def batch_standardised(z: Float[Array, "b d"], eps: float = 1e-5) -> Float[Array, "b d"]:
    """Returns z with mean 0 and variance 1 over the batch in every dimension: batch norm without parameters."""
    z = z - jnp.mean(z, axis=0)
    return z * jax.lax.rsqrt(jnp.mean(jnp.square(z), axis=0) + eps)


def barlow_twins_loss(
    first: Float[Array, "b d"], second: Float[Array, "b d"], *, redundancy_weight: float
) -> tuple[Scalar, dict[str, Scalar]]:
    """Returns sum_i (1 - C_ii)^2 + weight * sum_{i != j} C_ij^2 for the cross-correlation C, and the two sums."""
    correlation = batch_standardised(first).T @ batch_standardised(second) / len(first)  # [D, D]
    own = jnp.diagonal(correlation)
    terms = {
        "invariance": jnp.sum(jnp.square(1 - own)),
        # The diagonal is subtracted, not masked: no [D, D] mask to build, and the gradient stays one matmul.
        "redundancy": jnp.sum(jnp.square(correlation)) - jnp.sum(jnp.square(own)),
    }
    return terms["invariance"] + redundancy_weight * terms["redundancy"], terms
