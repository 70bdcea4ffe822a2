"""Layer norm with a gradient of its own: half the kernels of the one that JAX derives."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jaxtyping import Float

Rows = Float[Array, "*batch d"]
Numbers = Float[Array, "d"]


class LayerNorm(nnx.LayerNorm):
    """`nnx.LayerNorm` over the last axis, with scale and bias; statistics are computed in float32."""

    def __init__(self, width: int, *, epsilon: float, dtype: Any, rngs: nnx.Rngs):
        super().__init__(width, epsilon=epsilon, dtype=dtype, rngs=rngs)

    def __call__(self, x: Rows) -> Rows:  # type: ignore[override]  # no mask
        assert self.scale is not None and self.bias is not None
        y = layer_norm(x, self.scale[...], self.bias[...], self.epsilon)
        return y.astype(self.dtype or y.dtype)


def layer_norm(x: Rows, scale: Numbers, bias: Numbers, epsilon: float) -> Rows:
    """Returns (x - mean) / sqrt(variance + epsilon) * scale + bias in float32, mean and variance over the last axis."""
    return _normalised(epsilon, x, scale, bias)


def _forward(epsilon: float, x: Array, scale: Array, bias: Array) -> tuple[Array, tuple[Array, ...]]:
    wide = x.astype(jnp.float32)
    mean, square = (jnp.mean(values, axis=-1, keepdims=True) for values in (wide, jnp.square(wide)))  # in one pass
    rate = lax.rsqrt(jnp.maximum(square - jnp.square(mean), 0) + epsilon)
    return (wide - mean) * rate * scale + bias, (x, mean, rate, scale)


def _backward(epsilon: float, kept: tuple[Array, ...], dy: Array) -> tuple[Array, Array, Array]:
    del epsilon
    x, mean, rate, scale = kept
    unit, batch = (x.astype(jnp.float32) - mean) * rate, tuple(range(x.ndim - 1))
    scaled = dy * scale
    along = jnp.mean(scaled * unit, axis=-1, keepdims=True)
    dx = rate * (scaled - jnp.mean(scaled, axis=-1, keepdims=True) - unit * along)
    return dx.astype(x.dtype), jnp.sum(dy * unit, axis=batch), jnp.sum(dy, axis=batch)


def _value(epsilon: float, x: Array, scale: Array, bias: Array) -> Array:
    return _forward(epsilon, x, scale, bias)[0]


_normalised = jax.custom_vjp(_value, nondiff_argnums=(0,))
_normalised.defvjp(_forward, _backward)
