"""Batch norm as one multiply and one add per number; layer norm with half the kernels of the gradient JAX derives."""

import dataclasses
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from jepa_jax.config.groups import Config, NamedGroup
from jepa_jax.config.schema import Problem
from jepa_jax.models.kernels import forward_mode
from jepa_jax.models.remat import statistic

Rows = Float[Array, "*batch d"]
Numbers = Float[Array, "d"]


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


class LayerNorm(nnx.LayerNorm):
    """`nnx.LayerNorm` over the last axis, with scale and bias; statistics are computed in float32."""

    def __call__(self, x: Rows) -> Rows:  # type: ignore[override]  # no mask
        assert self.scale is not None and self.bias is not None
        operands = (x, self.scale[...], self.bias[...], self.epsilon)
        y = _layer_norm_forward(*operands)[0] if forward_mode else layer_norm(*operands)
        return y.astype(self.dtype or y.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def layer_norm(x: Rows, scale: Numbers, bias: Numbers, epsilon: float) -> Rows:
    """Returns (x - mean) / sqrt(variance + epsilon) * scale + bias in float32, mean and variance over the last axis."""
    return _layer_norm_forward(x, scale, bias, epsilon)[0]


def _layer_norm_forward(x: Array, scale: Array, bias: Array, epsilon: float) -> tuple[Array, tuple[Array, ...]]:
    wide = x.astype(jnp.float32)
    mean, square = (jnp.mean(values, axis=-1, keepdims=True) for values in (wide, jnp.square(wide)))  # in one pass
    rate = lax.rsqrt(jnp.maximum(square - jnp.square(mean), 0) + epsilon)
    return (wide - mean) * rate * scale + bias, (x, mean, rate, scale)


def _layer_norm_backward(epsilon: float, kept: tuple[Array, ...], dy: Array) -> tuple[Array, Array, Array]:
    del epsilon
    x, mean, rate, scale = kept
    unit, batch = (x.astype(jnp.float32) - mean) * rate, tuple(range(x.ndim - 1))
    scaled = dy * scale
    along = jnp.mean(scaled * unit, axis=-1, keepdims=True)
    dx = rate * (scaled - jnp.mean(scaled, axis=-1, keepdims=True) - unit * along)
    return dx.astype(x.dtype), jnp.sum(dy * unit, axis=batch), jnp.sum(dy, axis=batch)


layer_norm.defvjp(_layer_norm_forward, _layer_norm_backward)
