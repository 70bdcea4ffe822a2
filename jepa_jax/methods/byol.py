"""BYOL: predict the projection that a slowly following copy makes of another view; no term prevents collapse.

Reference: Grill et al., "Bootstrap Your Own Latent", NeurIPS 2020. The defaults are the paper's.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar

import jax
from flax import nnx

from jepa_jax.config.groups import Config, NamedGroup
from jepa_jax.config.schema import PROBABILITY, Problem, key
from jepa_jax.losses.cosine import mean_cosine
from jepa_jax.methods.contract import Batch, Ema, Output
from jepa_jax.methods.image_method import EncoderWith, ImageMethod
from jepa_jax.methods.schedules import cosine
from jepa_jax.models.heads import Projector


@dataclasses.dataclass(frozen=True)
class ByolConfig(NamedGroup):
    num_views: ClassVar[int] = 2

    projector: tuple[int, ...] = key((4096, 256), "widths of the projector's layers", least=1)
    predictor: int = key(4096, "hidden width of the predictor", least=1)
    ema_start: float = key(0.996, "momentum of the copy at the first step", **PROBABILITY)
    ema_end: float = key(1.0, "momentum of the copy at the last step, reached by half a cosine", **PROBABILITY)

    def problems(self, config: Config) -> Iterator[Problem]:
        if not self.projector:
            yield Problem("method.projector", "needs at least one width, e.g. (4096, 256)")


class Byol(ImageMethod):
    """See `jepa_jax.methods.contract.Method`."""

    Keys = ByolConfig

    def __init__(self, config: Config, total_steps: int):
        super().__init__(config, total_steps)
        momentum = cosine(self.config.ema_start, self.config.ema_end, total_steps)
        self.ema = Ema(("encoder", "projector"), momentum)

    def init(self, key: jax.Array, sample: Batch) -> EncoderWith:
        rngs = nnx.Rngs(params=key)
        encoder = self.encoder(sample, rngs)
        widths = self.config.projector
        projector = Projector(encoder.feature_dim, widths, dtype=self.dtype, rngs=rngs)
        predictor = Projector(widths[-1], (self.config.predictor, widths[-1]), dtype=self.dtype, rngs=rngs)
        return EncoderWith(encoder, projector=projector, predictor=predictor)

    def loss(self, model: Any, target: Any, batch: Batch, key: jax.Array, step: jax.Array) -> Output:
        del step
        views = self.batch_views(batch, key, 2)
        online = [self.embed(model, view) for view in views]
        with jax.named_scope("predictor"):
            predicted = [model.predictor(z, train=True) for _, z in online]
        with jax.named_scope("target"):
            slow = [self.embed(target, view) for view in views]
        with jax.named_scope("loss"):
            similarity = 0.5 * (mean_cosine(predicted[0], slow[1][1]) + mean_cosine(predicted[1], slow[0][1]))
        read = slow if self.run_config.eval.weights == "target" else online
        return Output(2 * (2 - 2 * similarity), {"similarity": similarity}, read[0][0])
