"""The perceptron of transformer blocks, and its activation with a gradient of its own."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float

from jepa_jax.models.kernels import forward_mode


def mlp(
    x: Float[Array, "*batch d"],
    up: Callable[[Array], Array],
    down: Callable[[Array], Array],
    between: Callable[[Array], Array] = lambda hidden: hidden,
) -> Float[Array, "*batch e"]:
    """Returns down(between(gelu(up(x)))); tokens are one long axis, the form in which products are fastest."""
    hidden = between(gelu(up(x.reshape(-1, x.shape[-1]))))
    return down(hidden).reshape(*x.shape[:-1], -1)


def swiglu(
    x: Float[Array, "*batch d"], up: Callable[[Array], Array], down: Callable[[Array], Array]
) -> Float[Array, "*batch e"]:
    """Returns down(silu(gate) * value), where `up` gives the gate and then the value."""
    gate, value = jnp.split(up(x.reshape(-1, x.shape[-1])), 2, axis=-1)
    return down(jax.nn.silu(gate) * value).reshape(*x.shape[:-1], -1)


def gelu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Returns x times the normal distribution function of x, exactly (no tanh)."""
    return jax.nn.gelu(x, approximate=False) if forward_mode else _gelu(x)


@jax.custom_vjp
def _gelu(x: Array) -> Array:
    return _gelu_forward(x)[0]


def _gelu_forward(x: Array) -> tuple[Array, Array]:
    wide = x.astype(jnp.float32)
    below = 0.5 + 0.5 * lax.erf(wide * math.sqrt(0.5))
    slope = below + wide * jnp.exp(-0.5 * wide * wide) * (1 / math.sqrt(2 * math.pi))
    # The slope is kept instead of x: as cheap to keep, and the backward pass has one product left to compute. The
    # barrier makes both in one pass, where XLA would compute them again inside of each product that reads them.
    return lax.optimization_barrier(((wide * below).astype(x.dtype), slope.astype(x.dtype)))


def _gelu_backward(slope: Array, dy: Array) -> tuple[Array]:
    def stored(dy: Array, slope: Array) -> Array:
        return lax.optimization_barrier(dy * slope)

    # GPUs add up the gradient of the bias while they compute the product.
    return (lax.platform_dependent(dy, slope, cuda=lambda dy, slope: dy * slope, default=stored),)


_gelu.defvjp(_gelu_forward, _gelu_backward)
