"""A method of the user's own for data that are not images: the mean of each map, fitted by a line."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jepa_jax.config.groups import NamedGroup
from jepa_jax.methods.contract import Batch, Method, Output


@dataclasses.dataclass(frozen=True)
class FireConfig(NamedGroup):
    pass


class FireMethod(Method):
    Keys = FireConfig

    def init(self, key: jax.Array, sample: Batch) -> nnx.Module:
        return nnx.Linear(sample["fire"].shape[-1], 1, rngs=nnx.Rngs(params=key))

    def loss(self, model: Any, target: Any, batch: Batch, key: jax.Array, step: jax.Array) -> Output:
        return Output(jnp.mean(jnp.square(model(batch["fire"]) - batch["length"][:, None, None, None])), {})


class HistoryMethod(Method):
    """Fits the next mask by the mean over valid frames of a hidden layer: histories may have any length."""

    Keys = FireConfig

    def init(self, key: jax.Array, sample: Batch) -> nnx.Module:
        rngs = nnx.Rngs(params=key)
        return nnx.List([nnx.Linear(sample["fire"].shape[-1], 8, rngs=rngs), nnx.Linear(8, 1, rngs=rngs)])

    def loss(self, model: Any, target: Any, batch: Batch, key: jax.Array, step: jax.Array) -> Output:
        first, last = model
        valid = batch["valid"][..., None, None, None]
        hidden = jnp.mean(jnp.tanh(first(batch["fire"].astype(jnp.float32))) * valid, axis=1)  # [B, H, W, 8]
        return Output(jnp.mean(jnp.square(last(hidden) - batch["target"])), {})
