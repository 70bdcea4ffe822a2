"""Methods of the user's own that learn from the sources of `tests.sequences`."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jepa_jax.config.groups import Config
from jepa_jax.methods.contract import Batch, Method, Output
from tests.tiny import tiny_config


class LineMethod(Method):
    """Fits the length of a `SequenceSource` by a line through each row of its maps."""

    def init(self, key: jax.Array, sample: Batch) -> nnx.Module:
        return nnx.Linear(sample["frames"].shape[-1], 1, rngs=nnx.Rngs(params=key))

    def loss(self, model: Any, target: Any, batch: Batch, key: jax.Array, step: jax.Array) -> Output:
        return Output(jnp.mean(jnp.square(model(batch["frames"]) - batch["length"][:, None, None, None])), {})


class HistoryMethod(Method):
    """Fits the next mask of `PaddedSequences` by the mean over valid frames of a hidden layer."""

    def init(self, key: jax.Array, sample: Batch) -> nnx.Module:
        rngs = nnx.Rngs(params=key)
        return nnx.List([nnx.Linear(sample["frames"].shape[-1], 8, rngs=rngs), nnx.Linear(8, 1, rngs=rngs)])

    def loss(self, model: Any, target: Any, batch: Batch, key: jax.Array, step: jax.Array) -> Output:
        first, last = model
        valid = batch["valid"][..., None, None, None]
        hidden = jnp.mean(jnp.tanh(first(batch["frames"].astype(jnp.float32))) * valid, axis=1)  # [B, H, W, 8]
        return Output(jnp.mean(jnp.square(last(hidden) - batch["target"])), {})


PADDED = {
    "method__name": f"{__name__}:HistoryMethod", "data__source": "tests.sequences:PaddedSequences",
    "data__num_train": 64, "data__num_test": 32, "data__max_frames": 5, "data__frame_buckets": (3,),
}  # fmt: skip


def padded_config(**overrides: Any) -> Config:
    """Returns the tiny config with a method of padded sequences."""
    return tiny_config(**PADDED | overrides)
