"""SimSiam: predict the network's own projection of another view, through which no gradient flows.

Reference: Chen and He, "Exploring Simple Siamese Representation Learning", CVPR 2021. The defaults are the paper's; as
there, the projection is batch-normalised without parameters and the predictor's rate does not decay.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from jepa_jax.config.groups import Config, NamedGroup
from jepa_jax.config.schema import Problem, key
from jepa_jax.losses.barlow_twins import batch_standardised
from jepa_jax.losses.cosine import mean_cosine, unit
from jepa_jax.methods.contract import Batch, Output, ParamGroup
from jepa_jax.methods.image_method import EncoderWith, ImageMethod
from jepa_jax.models.heads import Projector


@dataclasses.dataclass(frozen=True)
class SimSiamConfig(NamedGroup):
    num_views: ClassVar[int] = 2

    projector: tuple[int, ...] = key((2048, 2048, 2048), "widths of the projector's layers", least=1)
    predictor: int = key(512, "hidden width of the predictor", least=1)
    constant_predictor_lr: bool = key(True, "whether the predictor keeps the peak rate for the whole run")

    def problems(self, config: Config) -> Iterator[Problem]:
        if not self.projector:
            yield Problem("method.projector", "needs at least one width, e.g. (2048, 2048, 2048)")


class SimSiam(ImageMethod):
    """See `jepa_jax.methods.contract.Method`."""

    Keys = SimSiamConfig

    def __init__(self, config: Config, total_steps: int):
        super().__init__(config, total_steps)
        if self.config.constant_predictor_lr:
            self.param_groups = (ParamGroup("^predictor/", constant=True),)

    def init(self, key: jax.Array, sample: Batch) -> EncoderWith:
        rngs = nnx.Rngs(params=key)
        encoder = self.encoder(sample, rngs)
        widths = self.config.projector
        projector = Projector(encoder.feature_dim, widths, dtype=self.dtype, rngs=rngs)
        predictor = Projector(widths[-1], (self.config.predictor, widths[-1]), dtype=self.dtype, rngs=rngs)
        return EncoderWith(encoder, projector=projector, predictor=predictor)

    def loss(self, model: Any, target: None, batch: Batch, key: jax.Array, step: jax.Array) -> Output:
        del target, step
        outputs = [self.embed(model, view) for view in self.batch_views(batch, key, 2)]
        projected = [batch_standardised(z) for _, z in outputs]
        with jax.named_scope("predictor"):
            predicted = [model.predictor(z, train=True) for z in projected]
        with jax.named_scope("loss"):
            wanted = jax.lax.stop_gradient(projected)
            similarity = 0.5 * (mean_cosine(predicted[0], wanted[1]) + mean_cosine(predicted[1], wanted[0]))
            # Of directions spread evenly over the sphere this is 1; of collapsed ones 0.
            spread = jnp.mean(jnp.std(unit(wanted[0]), axis=0)) * wanted[0].shape[-1] ** 0.5
        return Output(-similarity, {"spread": spread}, outputs[0][0])
