"""DINO: the student's distribution over prototypes matches that of a centred and sharpened teacher, across views.

Reference: Caron et al., "Emerging Properties in Self-Supervised Vision Transformers", ICCV 2021.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Scalar


def dino_loss(
    student: Float[Array, "v b k"],
    teacher: Float[Array, "g b k"],
    centre: Float[Array, " k"],
    *,
    student_temperature: float,
    teacher_temperature: Float[Array, ""] | float,
) -> tuple[Scalar, dict[str, Scalar]]:
    """Returns the mean cross-entropy over pairs of different views, and its terms.

    Args:
      student: logits of all views, those that the teacher sees first.
      teacher: logits of the views that the teacher sees.
      centre: running mean of the teacher's logits, subtracted so that no prototype takes all images.
      student_temperature, teacher_temperature: divisors of the logits; a lower one of the teacher sharpens it.
    """
    views, seen = len(student), len(teacher)
    wanted = jax.nn.softmax((teacher - centre) / teacher_temperature)
    log_student = jax.nn.log_softmax(student / student_temperature)
    pairs = -jnp.einsum("gbk,vbk->gv", wanted, log_student) / student.shape[1]
    across = jnp.sum(pairs) - jnp.trace(pairs)  # a view is not compared with itself
    entropy = -jnp.mean(jnp.sum(wanted * jnp.log(wanted + 1e-12), axis=-1))
    return across / (views * seen - seen), {"teacher_entropy": entropy}
