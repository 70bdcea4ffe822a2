"""A method that predicts masks: a logistic regression of pixels on the last mask, the terrain and the valid wind."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jepa_jax.data.sources import open_data
from jepa_jax.evals.evaluators import EvaluationContext
from jepa_jax.methods.contract import Method, Output
from jepa_jax.projects.wildfire.losses import MaskLossConfig, mask_loss
from tests.stepping import build_program
from tests.tiny import tiny_config

FIRES = {
    "eval__untrained": True,
    "method__name": f"{__name__}:Pixels", "data__source": "wildfire", "data__max_frames": 12,
    "data__frame_buckets": (4,), "data__num_train": 64, "data__num_test": 24, "data__validation": 0.25,
    "eval__batch_size": 8, "optim__name": "adamw", "optim__lr": 0.1, "optim__weight_decay": 0.0,
}  # fmt: skip


class Model(nnx.Module):
    def __init__(self, channels, rngs):
        self.spread = nnx.Conv(1, 1, (3, 3), rngs=rngs)
        self.mix = nnx.Linear(channels + 3, 1, rngs=rngs)

    def __call__(self, batch):
        last = batch["fire"][:, -1].astype(jnp.float32)
        valid = batch["valid"][..., None]
        wind = jnp.sum(batch["wind"] * valid, 1) / jnp.sum(valid, 1)  # [B, 2], the same for any padding
        wind = jnp.broadcast_to(wind[:, None, None], (*last.shape[:3], 2))
        return self.mix(jnp.concatenate([self.spread(last), batch["static"], wind], -1))


class NormalisedModel(Model):
    def __init__(self, channels, rngs):
        super().__init__(channels, rngs)
        self.norm = nnx.BatchNorm(channels, rngs=rngs)

    def __call__(self, batch, train=False):
        return super().__call__({**batch, "static": self.norm(batch["static"], use_running_average=not train)})


class Pixels(Method):
    evaluators = ("next_mask",)
    traced: ClassVar[list[int]] = []  # frames of the batches that predictions were traced with

    def init(self, key: jax.Array, sample: Any) -> nnx.Module:
        return Model(sample["static"].shape[-1], nnx.Rngs(key))

    def loss(self, model, target, batch, key, step):
        logits = self.predict(model, batch)
        return Output(*mask_loss(logits, batch["target"], batch["known"], MaskLossConfig()))

    def predict(self, model, batch, *, train=False):
        if not train:
            self.traced.append(batch["fire"].shape[1])
        return model(batch)


class NormalisedPixels(Pixels):
    """Normalises the terrain by batch statistics."""

    def init(self, key: jax.Array, sample: Any) -> nnx.Module:
        return NormalisedModel(sample["static"].shape[-1], nnx.Rngs(key))

    def predict(self, model, batch, *, train=False):
        return model(batch, train)


def fire_config(**overrides: Any) -> Any:
    return tiny_config(**(FIRES | overrides))


def context_of(config: Any, mesh: Any = None) -> tuple[EvaluationContext, Any]:
    """Returns the context of an untrained program on all its data, and its state."""
    data = open_data(config.data)
    program = build_program(config, mesh, data.train.batch(np.arange(config.data.batch_size)))
    context = EvaluationContext(config, program, (data.train, data.test), validation=data.validation)
    return context, program.factory.create(0, data.train.batch(np.arange(config.data.batch_size)))
