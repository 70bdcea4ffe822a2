"""SIGReg and BCS: push embeddings towards an isotropic Gaussian by testing random one-dimensional slices.

Both compare the empirical characteristic function of each slice with that of N(0, 1). Reference: Balestriero and LeCun,
"LeJEPA", 2025. Means over the batch are over the global batch: slices come from a key that is equal on all devices and
the compiler reduces the batch axis, so value and gradient do not depend on how the batch is split.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Scalar

from jepa_jax.losses.roles import ALL, Roles
from jepa_jax.losses.vicreg import invariance


def random_slices(key: jax.Array, dims: int, count: int) -> Float[Array, "d m"]:
    """Returns `count` Gaussian directions of unit length as columns."""
    directions = jax.random.normal(key, (dims, count))
    return directions / jnp.linalg.norm(directions, axis=0)


def ecf_distance(x: Float[Array, "b m"], t: Float[Array, " k"]) -> Float[Array, "k m"]:
    """Returns |mean exp(i t x) - exp(-t^2 / 2)|^2 for samples x at knots t."""
    angles = t[:, None, None] * x  # [K, B, M], fused into the means
    real = jnp.mean(jnp.cos(angles), axis=1) - jnp.exp(-jnp.square(t) / 2)[:, None]
    imaginary = jnp.mean(jnp.sin(angles), axis=1)
    return jnp.square(real) + jnp.square(imaginary)


def sigreg(z: Float[Array, "b d"], slices: Float[Array, "d m"], knots: int = 17, t_max: float = 3.0) -> Scalar:
    """Returns the SIGReg statistic on unit slices: B times the mean weighted distance over slices.

    The integrand is even, so the trapezoid rule runs over [0, t_max] with doubled weights, windowed by exp(-t^2 / 2).
    """
    t = jnp.linspace(0, t_max, knots)
    dt = t_max / (knots - 1)
    trapezoid = jnp.full(knots, 2 * dt).at[jnp.array([0, -1])].set(dt)
    distance = ecf_distance(z @ slices, t)  # [K, M]
    return z.shape[0] * jnp.mean((trapezoid * jnp.exp(-jnp.square(t) / 2)) @ distance)


def sigreg_loss(
    z: Float[Array, "v b d"], slices: Float[Array, "d m"], *, weight: float, roles: Roles = ALL
) -> tuple[Scalar, dict[str, Scalar]]:
    """Returns LeJEPA's loss: weight * SIGReg + (1 - weight) * mean squared distance of the views to their mean.

    SIGReg is that of all views; with `roles`, context views are compared with the mean of the target views.
    """
    terms = {
        "sigreg": jnp.mean(jax.vmap(lambda v: sigreg(v, slices))(z)),
        "invariance": jnp.mean(jnp.square(roles.contexts(z) - jnp.mean(roles.targets(z), axis=0))),
    }
    return weight * terms["sigreg"] + (1 - weight) * terms["invariance"], terms


def epps_pulley(z: Float[Array, "b d"], slices: Float[Array, "d m"], knots: int = 10, t_max: float = 3.0) -> Scalar:
    """Returns EB-JEPA's form of the statistic: trapezoid over [-t_max, t_max], no factor of the batch size."""
    t = jnp.linspace(-t_max, t_max, knots)
    distance = ecf_distance(z @ slices, t)
    return jnp.mean(jnp.trapezoid(jnp.exp(-jnp.square(t) / 2)[:, None] * distance, t, axis=0))


def bcs_loss(
    z: Float[Array, "v b d"], slices: Float[Array, "d m"], *, weight: float, roles: Roles = ALL
) -> tuple[Scalar, dict[str, Scalar]]:
    """Returns EB-JEPA's batch characteristic slicing: mse of views + weight * mean Epps-Pulley statistic over views."""
    terms = {
        "bcs": jnp.mean(jax.vmap(lambda v: epps_pulley(v, slices))(z)),
        "invariance": invariance(z, roles),
    }
    return terms["invariance"] + weight * terms["bcs"], terms
