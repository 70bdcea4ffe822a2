"""VICReg: views agree (invariance), every dimension varies (variance), dimensions differ (covariance).

Reference: Bardes, Ponce, LeCun, "VICReg", ICLR 2022. Statistics are taken over the batch axis as the compiled program
sees it: under `jit` with a sharded batch that is the global batch.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Scalar

from jepa_jax.losses.roles import ALL, Roles


def invariance(z: Float[Array, "v b d"], roles: Roles = ALL) -> Scalar:
    """Returns the mean squared distance of a context view and another target view, averaged over all such pairs.

    Computed from distances to the mean target m: sum over pairs |c - t|^2 = T sum |c - m|^2 + C sum |t - m|^2.
    """
    context, target = roles.contexts(z), roles.targets(z)
    mean = jnp.mean(target, axis=0)
    pairs = len(context) * len(target) - roles.in_both(len(z)).sum()
    spread = jnp.mean(jnp.square(context - mean)) + jnp.mean(jnp.square(target - mean))
    return len(context) * len(target) / pairs * spread


def hinge_std(z: Float[Array, "b d"], eps: float = 1e-4) -> Scalar:
    """Returns how far the standard deviation of each dimension falls short of 1, on average."""
    return jnp.mean(jax.nn.relu(1 - jnp.sqrt(jnp.var(z, axis=0, ddof=1) + eps)))


def off_diagonal_covariance(z: Float[Array, "b d"], normalisation: str) -> Scalar:
    """Returns the sum of squared off-diagonal covariances, over D (D - 1) for "pairs", over D for "dimensions"."""
    batch, dims = z.shape
    z = z - jnp.mean(z, axis=0)
    covariance = z.T @ z / (batch - 1)
    # The diagonal is subtracted, not masked: no [D, D] mask to build, and the gradient stays one matmul.
    total = jnp.sum(jnp.square(covariance)) - jnp.sum(jnp.square(jnp.diagonal(covariance)))
    return total / {"pairs": dims * (dims - 1), "dimensions": dims}[normalisation]


def vicreg_loss(
    z: Float[Array, "v b d"],
    *,
    std_weight: float,
    cov_weight: float,
    invariance_weight: float = 1.0,
    covariance_normalisation: str = "pairs",
    roles: Roles = ALL,
) -> tuple[Scalar, dict[str, Scalar]]:
    """Returns the weighted sum of the three terms for V views, and the terms.

    Variance and covariance add up over two views; with more they are twice the mean over views, so that a weight means
    the same for any number of views. The paper's weights 25/25/1 go with "dimensions" (25/12.5/1 is its released code,
    which halves the variance term), EB-JEPA's 1/1/80 with "pairs".
    """
    terms = {
        "invariance": invariance(z, roles),
        "variance": 2 * jnp.mean(jax.vmap(hinge_std)(z)),
        "covariance": 2 * jnp.mean(jax.vmap(lambda v: off_diagonal_covariance(v, covariance_normalisation))(z)),
    }
    loss = invariance_weight * terms["invariance"] + std_weight * terms["variance"] + cov_weight * terms["covariance"]
    return loss, terms
