"""Terms of losses over sequences of latents z [B, T, D]; statistics are those of the global batch.

The statistics of variance and covariance are those of all latents of all times together. SIGReg tests each time on its
own: latents of one sequence are not independent.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Scalar

from jepa_jax.losses import vicreg
from jepa_jax.losses.sigreg import random_slices, sigreg

Latents = Float[Array, "b t d"]


def variance(z: Latents) -> Scalar:
    """Returns how far the standard deviation of each number falls short of 1, on average."""
    return vicreg.hinge_std(z.reshape(-1, z.shape[-1]))


def covariance(z: Latents) -> Scalar:
    """Returns the mean of the squared covariances of two different numbers."""
    return vicreg.off_diagonal_covariance(z.reshape(-1, z.shape[-1]), "pairs")


def temporal_similarity(z: Latents) -> Scalar:
    """Returns the mean squared difference of consecutive latents."""
    return jnp.mean(jnp.square(z[:, 1:] - z[:, :-1]))


def sigreg_per_step(z: Latents, key: jax.Array, *, slices: int) -> Scalar:
    """Returns the mean over times of SIGReg along random directions, the same ones for each time."""
    directions = random_slices(key, z.shape[-1], slices)
    return jnp.mean(jax.vmap(lambda at: sigreg(at, directions), in_axes=1)(z))


def weighted(makers: Mapping[str, Callable[[], Scalar]], weights: Any) -> tuple[Scalar, dict[str, Scalar]]:
    """Returns the sum of the terms that have a weight, by their names in `weights`, and these terms."""
    terms = {name: make() for name, make in makers.items() if getattr(weights, name)}
    return sum((getattr(weights, name) * term for name, term in terms.items()), jnp.zeros([])), terms


def spread(z: Latents, weights: Any, key: jax.Array) -> tuple[Scalar, dict[str, Scalar]]:
    """Returns the terms over a batch that keep latents from collapsing, weighted."""
    makers = {
        "variance": lambda: variance(z),
        "covariance": lambda: covariance(z),
        "sigreg": lambda: sigreg_per_step(z, key, slices=weights.slices),
    }
    return weighted(makers, weights)


def squared_error(predicted: Float[Array, "..."], target: Float[Array, "..."]) -> Scalar:
    """Returns the mean squared error, in float32."""
    return jnp.mean(jnp.square(predicted.astype(jnp.float32) - target.astype(jnp.float32)))
