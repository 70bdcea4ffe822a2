"""BYOL: predict the projection that a slowly following copy makes of another view; no term prevents collapse.

Reference: Grill et al., "Bootstrap Your Own Latent", NeurIPS 2020. The defaults are the paper's.
"""

import dataclasses
from typing import Any, ClassVar

import jax

from jepa_jax.config.groups import Config, NamedGroup
from jepa_jax.config.schema import PROBABILITY, key
from jepa_jax.losses.cosine import crossed_cosine
from jepa_jax.methods.contract import Batch, Ema, Output
from jepa_jax.methods.image_method import PredictorMethod
from jepa_jax.methods.schedules import cosine


@dataclasses.dataclass(frozen=True)
class ByolConfig(NamedGroup):
    num_views: ClassVar[int] = 2

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

    def loss(self, model: Any, target: Any, batch: Batch, key: jax.Array, step: jax.Array) -> Output:
        del step
        views = self.batch_views(batch, key, 2)
        online = [self.embed(model, view) for view in views]
        with jax.named_scope("predictor"):
            predicted = [model.predictor(z, train=True) for _, z in online]
        with jax.named_scope("target"):
            slow = [self.embed(target, view) for view in views]
        with jax.named_scope("loss"):
            similarity = crossed_cosine(predicted, [z for _, z in slow])
        read = slow if self.run_config.eval.weights == "target" else online
        return Output(2 * (2 - 2 * similarity), {"similarity": similarity}, read[0][0])
