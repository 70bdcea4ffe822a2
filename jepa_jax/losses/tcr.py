"""EMP-SSL's loss: crops of an image agree in direction, and the crops of different images span as much as possible.

Reference: Tong, Chen, Ma, LeCun, "EMP-SSL: Towards Self-Supervised Learning in One Training Epoch", 2023. The batch is
the global one.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Scalar

from jepa_jax.losses.cosine import unit
from jepa_jax.losses.roles import ALL, Roles


def coding_rate(z: Float[Array, "b d"], distortion: float) -> Scalar:
    """Returns 1/2 log det(I + d / (b eps^2) z z^T), the total coding rate of b vectors, in nats."""
    batch, dims = z.shape
    gram = z @ z.T if batch <= dims else z.T @ z  # both have the same determinant
    factor = jnp.linalg.cholesky(jnp.eye(len(gram)) + dims / (batch * distortion) * gram)
    return jnp.sum(jnp.log(jnp.diagonal(factor)))


def tcr_loss(
    z: Float[Array, "v b d"], *, similarity_weight: float, distortion: float, roles: Roles = ALL
) -> tuple[Scalar, dict[str, Scalar]]:
    """Returns -(coding rate + weight * similarity) of unit vectors, and both terms.

    The coding rate is the mean over views; the similarity is that of context views to the mean of the target views.
    """
    z = unit(z)
    mean = unit(jnp.mean(roles.targets(z), axis=0))
    terms = {
        "coding_rate": jnp.mean(jax.vmap(lambda view: coding_rate(view, distortion))(z)),
        "similarity": jnp.mean(jnp.sum(roles.contexts(z) * mean, axis=-1)),
    }
    return -(terms["coding_rate"] + similarity_weight * terms["similarity"]), terms
