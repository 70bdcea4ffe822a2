"""Batch normalisation as one multiply and one add per number."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jepa_jax.config.groups import Config, NamedGroup
from jepa_jax.config.schema import Problem
from jepa_jax.models.remat import statistic


@dataclasses.dataclass(frozen=True)
class BatchNormConfig(NamedGroup):
    """Base of the groups of encoders with batch norm."""

    def problems(self, config: Config) -> Iterator[Problem]:
        if config.optim.name == "schedule_free_adamw" and not config.eval.calibration_images:
            yield Problem(
                "eval.calibration_images",
                f"schedule_free_adamw evaluates averaged weights; the running batch statistics of {self.name} belong "
                "to other weights; use 1000 or more",
            )


class BatchNorm(nnx.BatchNorm):
    """Normalises over all axes but the last, with statistics in float32 over the global batch.

    Mean, variance, scale and bias are folded into two numbers per channel first: on CPUs the elementwise part, and its
    gradient, is what batch norm costs.
    """

    def __init__(self, width: int, *, dtype: Any, rngs: nnx.Rngs):
        # Momentum 0.9 is 0.1 in PyTorch's convention.
        super().__init__(width, momentum=0.9, epsilon=1e-5, dtype=dtype, rngs=rngs)

    def __call__(  # type: ignore[override]
        self, x: Float[Array, "... c"], *, train: bool
    ) -> Float[Array, "... c"]:
        if train:
            axes = tuple(range(x.ndim - 1))
            wide = x.astype(jnp.float32)
            mean = statistic(jnp.mean(wide, axes))
            var = jnp.maximum(statistic(jnp.mean(jnp.square(wide), axes)) - jnp.square(mean), 0.0)
            self.mean[...] = self.momentum * self.mean[...] + (1 - self.momentum) * mean
            self.var[...] = self.momentum * self.var[...] + (1 - self.momentum) * var
        else:
            mean, var = self.mean[...], self.var[...]
        assert self.scale is not None and self.bias is not None  # the parent makes both unless told otherwise
        scale = self.scale[...] * jax.lax.rsqrt(var + self.epsilon)
        return (x * scale + (self.bias[...] - mean * scale)).astype(self.dtype)
