"""DINO: the student's distribution over prototypes matches that of a balanced and sharpened teacher, across views.

References: Caron et al., "Emerging Properties in Self-Supervised Vision Transformers", ICCV 2021; patches: Zhou et al.,
"iBOT", ICLR 2022; Sinkhorn-Knopp: Caron et al., "Unsupervised Learning of Visual Features by Contrasting Cluster
Assignments", NeurIPS 2020.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Scalar

Weights = Float[Array, "*n"]
Logits = Float[Array, "*n k"]


def dino_loss(
    student: Float[Array, "v b k"], wanted: Float[Array, "g b k"], *, student_temperature: float
) -> tuple[Scalar, dict[str, Scalar]]:
    """Returns the mean cross-entropy over pairs of different views, and its terms.

    Args:
      student: logits of all views, those that the teacher sees first.
      wanted: the teacher's distributions of the views that it sees.
      student_temperature: divisor of the student's logits.
    """
    views, seen = len(student), len(wanted)
    log_student = jax.nn.log_softmax(student / student_temperature)
    pairs = -jnp.einsum("gbk,vbk->gv", wanted, log_student) / student.shape[1]
    across = jnp.sum(pairs) - jnp.trace(pairs)  # a view is not compared with itself
    entropy = -jnp.mean(jnp.sum(wanted * jnp.log(wanted + 1e-12), axis=-1))
    return across / (views * seen - seen), {"teacher_entropy": entropy}


def masked_patch_loss(
    student: Float[Array, "*b n k"],
    wanted: Float[Array, "*b n k"],
    weights: Float[Array, "*b n"],
    *,
    student_temperature: float,
) -> Scalar:
    """Returns the mean over images of the mean cross-entropy of their hidden patches; 0 for an image without any.

    `weights` is 1 for a hidden patch and 0 for one that does not count.
    """
    cross_entropy = -jnp.sum(wanted * jax.nn.log_softmax(student / student_temperature), axis=-1)
    hidden = jnp.maximum(jnp.sum(weights, axis=-1, keepdims=True), 1)
    return jnp.mean(jnp.sum(cross_entropy * weights / hidden, axis=-1))


def sinkhorn(logits: Logits, weights: Weights, steps: int) -> Logits:
    """Returns distributions near exp(logits) that use all prototypes alike: Sinkhorn-Knopp over the global batch.

    Each step gives every prototype the same share of the samples of weight 1, then every sample a sum of 1.
    """
    samples = tuple(range(logits.ndim - 1))
    for _ in range(steps):
        logits = logits - jax.nn.logsumexp(logits, axis=samples, b=weights[..., None], keepdims=True)
        logits = jax.nn.log_softmax(logits)
    return jnp.exp(logits)
