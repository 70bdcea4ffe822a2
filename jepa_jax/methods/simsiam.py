"""SimSiam: predict the network's own projection of another view, through which no gradient flows.

Reference: Chen and He, "Exploring Simple Siamese Representation Learning", CVPR 2021. The defaults are the paper's; as
there, the projection is batch-normalised without parameters and the predictor's rate does not decay.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jepa_jax.config.groups import Config
from jepa_jax.config.schema import key
from jepa_jax.losses.barlow_twins import batch_standardised
from jepa_jax.losses.cosine import crossed_cosine, unit
from jepa_jax.methods.contract import ParamGroup, Terms
from jepa_jax.methods.image_method import PredictorMethod, TwoViewConfig


@dataclasses.dataclass(frozen=True)
class SimSiamConfig(TwoViewConfig):
    projector: tuple[int, ...] = key((2048, 2048, 2048), "widths of the projector's layers", least=1, nonempty=True)
    predictor: int = key(512, "hidden width of the predictor", least=1)
    constant_predictor_lr: bool = key(True, "whether the predictor keeps the peak rate for the whole run")


class SimSiam(PredictorMethod):
    """See `jepa_jax.methods.contract.Method`."""

    Keys = SimSiamConfig

    def __init__(self, config: Config, total_steps: int):
        super().__init__(config, total_steps)
        if self.config.constant_predictor_lr:
            self.param_groups = (ParamGroup("^predictor/", constant=True),)

    def batch_loss(
        self, model: Any, target: Any, embeddings: Any, key: jax.Array, step: jax.Array
    ) -> tuple[Float[Array, ""], Terms]:
        del target, key, step
        projected = [batch_standardised(z) for z in self.project(model, embeddings)]
        with jax.named_scope("predictor"):
            predicted = [model.predictor(z, train=True) for z in projected]
        with jax.named_scope("loss"):
            wanted = jax.lax.stop_gradient(projected)
            similarity = crossed_cosine(predicted, wanted)
            # Of directions spread evenly over the sphere this is 1; of collapsed ones 0.
            spread = jnp.mean(jnp.std(unit(wanted[0]), axis=0)) * wanted[0].shape[-1] ** 0.5
        return -similarity, {"spread": spread}
