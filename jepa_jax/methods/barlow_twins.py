"""Barlow Twins: two views of an image correlate dimension by dimension, and different dimensions do not.

Reference: Zbontar et al., "Barlow Twins", ICML 2021. The defaults are the paper's.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar

import jax
from flax import nnx

from jepa_jax.config.groups import Config, NamedGroup
from jepa_jax.config.schema import Problem, key
from jepa_jax.losses.barlow_twins import barlow_twins_loss
from jepa_jax.methods.contract import Batch, Output
from jepa_jax.methods.image_method import EncoderWith, ImageMethod
from jepa_jax.models.heads import Projector


@dataclasses.dataclass(frozen=True)
class BarlowTwinsConfig(NamedGroup):
    num_views: ClassVar[int] = 2

    projector: tuple[int, ...] = key((8192, 8192, 8192), "widths of the projector's layers", least=1)
    redundancy_weight: float = key(0.0051, "lambda: weight of the correlations between dimensions", least=0)

    def problems(self, config: Config) -> Iterator[Problem]:
        if not self.projector:
            yield Problem("method.projector", "needs at least one width, e.g. (8192, 8192, 8192)")


class BarlowTwins(ImageMethod):
    """See `jepa_jax.methods.contract.Method`."""

    Keys = BarlowTwinsConfig

    def init(self, key: jax.Array, sample: Batch) -> EncoderWith:
        rngs = nnx.Rngs(params=key)
        encoder = self.encoder(sample, rngs)
        projector = Projector(encoder.feature_dim, self.config.projector, dtype=self.dtype, rngs=rngs)
        return EncoderWith(encoder, projector=projector)

    def loss(self, model: Any, target: None, batch: Batch, key: jax.Array, step: jax.Array) -> Output:
        del target, step
        (features, first), (_, second) = [self.embed(model, view) for view in self.batch_views(batch, key, 2)]
        with jax.named_scope("loss"):
            loss, terms = barlow_twins_loss(first, second, redundancy_weight=self.config.redundancy_weight)
        return Output(loss, terms, features)
