"""KoLeo: features of different images spread evenly over the sphere.

Reference: Sablayrolles et al., "Spreading Vectors for Similarity Search", ICLR 2019.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Scalar

from jepa_jax.losses.cosine import unit

EPS = 1e-8


def koleo_loss(features: Float[Array, "b d"]) -> Scalar:
    """Returns -mean(log distance) of features of length 1 to the nearest of the others, over the global batch."""
    z = unit(features)
    similarity = jax.lax.stop_gradient(z @ z.T) - 4 * jnp.eye(len(z))
    # Subtracted, not 2 - 2 cos: the nearest may be too close for the difference of rounded cosines.
    nearest = z[jnp.argmax(similarity, axis=-1)]
    distance = jnp.sqrt(jnp.sum(jnp.square(z - nearest), axis=-1) + EPS**2)
    return -jnp.mean(jnp.log(distance + EPS))
