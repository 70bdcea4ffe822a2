"""InfoNCE: a view must find the other views of its image among those of the whole batch.

Reference: van den Oord et al., "Representation Learning with Contrastive Predictive Coding", 2018; here each view is
compared with the mean of its image's other views, so V views cost V products of [B, B].
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Scalar

from jepa_jax.losses.cosine import unit
from jepa_jax.losses.roles import ALL, Roles


def infonce_loss(
    z: Float[Array, "v b d"], *, temperature: float, roles: Roles = ALL
) -> tuple[Scalar, dict[str, Scalar]]:
    """Returns the cross-entropy over the global batch of cosine similarities / temperature, and its terms.

    With `roles`, each context view is compared with the mean of the other target views.
    """
    own_share = roles.in_both(len(z))[:, None, None]  # a view is not compared with itself
    z = unit(z)
    context, target = roles.contexts(z), roles.targets(z)
    others = unit((jnp.sum(target, axis=0) - own_share * context) / (len(target) - own_share))  # [C, B, D]
    logits = jnp.einsum("vbd,vcd->vbc", context, others) / temperature
    own = jnp.diagonal(logits, axis1=1, axis2=2)  # [C, B]
    cross_entropy = jnp.mean(jax.nn.logsumexp(logits, axis=-1) - own)
    found = jnp.mean(jnp.argmax(logits, axis=-1) == jnp.arange(z.shape[1]))
    return cross_entropy, {"similarity": jnp.mean(own) * temperature, "retrieval": 100 * found}
