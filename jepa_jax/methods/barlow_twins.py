"""Barlow Twins: two views of an image correlate dimension by dimension, and different dimensions do not.

Reference: Zbontar et al., "Barlow Twins", ICML 2021. The defaults are the paper's.
"""

import dataclasses
from typing import Any

import jax
from jaxtyping import Array, Float

from jepa_jax.config.schema import key
from jepa_jax.losses.barlow_twins import barlow_twins_loss
from jepa_jax.methods.contract import Terms
from jepa_jax.methods.image_method import ProjectorMethod, TwoViewConfig


@dataclasses.dataclass(frozen=True)
class BarlowTwinsConfig(TwoViewConfig):
    projector: tuple[int, ...] = key((8192, 8192, 8192), "widths of the projector's layers", least=1, nonempty=True)
    redundancy_weight: float = key(0.0051, "lambda: weight of the correlations between dimensions", least=0)
    loss_scale: float = key(1.0, "factor of the loss; matters to parameters that LARS does not scale", least=0)


class BarlowTwins(ProjectorMethod):
    """See `jepa_jax.methods.contract.Method`."""

    Keys = BarlowTwinsConfig

    def batch_loss(
        self, model: Any, target: Any, embeddings: Any, key: jax.Array, step: jax.Array
    ) -> tuple[Float[Array, ""], Terms]:
        del target, key, step
        first, second = self.project(model, embeddings)
        with jax.named_scope("loss"):
            loss, terms = barlow_twins_loss(first, second, redundancy_weight=self.config.redundancy_weight)
        return self.config.loss_scale * loss, terms
