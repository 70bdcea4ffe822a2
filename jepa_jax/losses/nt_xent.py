"""NT-Xent: a view must find the other view of its image among all other views of the batch.

Reference: Chen et al., "A Simple Framework for Contrastive Learning of Visual Representations", ICML 2020.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Scalar

from jepa_jax.losses.cosine import unit


def nt_xent_loss(z: Float[Array, "2 b d"], *, temperature: float) -> tuple[Scalar, dict[str, Scalar]]:
    """Returns the mean cross-entropy among 2 B - 1 cosine similarities / temperature, and its terms."""
    z, count = unit(z), z.shape[1]
    logits = jnp.einsum("vbd,wcd->vbwc", z, z) / temperature
    itself = jnp.eye(2)[:, None, :, None] * jnp.eye(count)[None, :, None, :]
    others = jax.nn.logsumexp(logits, axis=(2, 3), where=itself == 0)  # [2, B]
    similarity = jnp.mean(jnp.sum(z[0] * z[1], axis=-1))
    return jnp.mean(others) - similarity / temperature, {"similarity": similarity}
