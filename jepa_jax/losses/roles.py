"""Roles of the views of an image: which are predicted from, and which are predicted to."""

from typing import NamedTuple

import jax
import numpy as np


class Roles(NamedTuple):
    """Views by index along the first axis of embeddings [V, B, D]; None stands for all of them.

    Attributes:
      context: views that are to agree with the targets.
      target: views that the others are to agree with; a view can be both.
    """

    context: tuple[int, ...] | None = None
    target: tuple[int, ...] | None = None

    def contexts(self, z: jax.Array) -> jax.Array:
        """Returns the embeddings of the context views [C, B, D]."""
        return z if self.context is None else z[np.asarray(self.context)]

    def targets(self, z: jax.Array) -> jax.Array:
        """Returns the embeddings of the target views [T, B, D]."""
        return z if self.target is None else z[np.asarray(self.target)]

    def in_both(self, views: int) -> np.ndarray:
        """Returns 1 for each context view that is a target too and 0 for the others: [C]."""
        context, target = (range(views) if chosen is None else chosen for chosen in self)
        return np.isin(np.asarray(context), np.asarray(target)).astype(np.float32)


ALL = Roles()
