"""BYOL: predict the projection that a slowly following copy makes of another view; no term prevents collapse.

Reference: Grill et al., "Bootstrap Your Own Latent", NeurIPS 2020. The defaults are the paper's.
"""

import dataclasses
from typing import Any

import jax
from jaxtyping import Array, Float

from jepa_jax.config.groups import Config
from jepa_jax.config.schema import PROBABILITY, key
from jepa_jax.losses.cosine import crossed_cosine
from jepa_jax.methods.contract import Batch, Ema, Terms
from jepa_jax.methods.image_method import PredictorMethod, TwoViewConfig
from jepa_jax.methods.schedules import cosine
from jepa_jax.methods.whole_batch import Encoded


@dataclasses.dataclass(frozen=True)
class ByolConfig(TwoViewConfig):
    projector: tuple[int, ...] = key((4096, 256), "widths of the projector's layers", least=1, nonempty=True)
    predictor: int = key(4096, "hidden width of the predictor", least=1)
    ema_start: float = key(0.996, "momentum of the copy at the first step", **PROBABILITY)
    ema_end: float = key(1.0, "momentum of the copy at the last step, reached by half a cosine", **PROBABILITY)


class Byol(PredictorMethod):
    """See `jepa_jax.methods.contract.Method`."""

    Keys = ByolConfig

    def __init__(self, config: Config, total_steps: int):
        super().__init__(config, total_steps)
        momentum = cosine(self.config.ema_start, self.config.ema_end, total_steps)
        self.ema = Ema(("encoder", "projector"), momentum)

    def encode_batch(self, model: Any, target: Any, batch: Batch, key: jax.Array, step: jax.Array) -> Encoded:
        del step
        views = self.two_views(batch, key)
        online, slow = self.encode_views(model.encoder, views), self.encode_views(target.encoder, views, "target")
        read = slow if self.run_config.eval.weights == "target" else online
        return Encoded((online.embeddings, slow.embeddings), read.features)

    def batch_loss(
        self, model: Any, target: Any, embeddings: Any, key: jax.Array, step: jax.Array
    ) -> tuple[Float[Array, ""], Terms]:
        del key, step
        online, slow = embeddings
        projected = self.project(model, online)
        with jax.named_scope("predictor"):
            predicted = [model.predictor(z, train=True) for z in projected]
        wanted = self.project(target, slow)
        with jax.named_scope("loss"):
            similarity = crossed_cosine(predicted, wanted)
        return 2 * (2 - 2 * similarity), {"similarity": similarity}
