"""Dense layers of transformers."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

from jepa_jax.models.remat import product


class Linear(nnx.Linear):
    """A dense layer whose result light remat keeps, with a gradient of its own."""

    def __call__(self, inputs: Array) -> Array:  # type: ignore[override]
        inputs, kernel = self.promote_dtype((inputs, self.kernel[...]), dtype=self.dtype)
        bias = None if self.bias is None else self.bias[...]
        y = affine(inputs.reshape(-1, inputs.shape[-1]), kernel, bias)
        return product(y.reshape(*inputs.shape[:-1], y.shape[-1]))


def linear(inputs: int, outputs: int, dtype: Any, rngs: nnx.Rngs, *, bias: bool = True) -> Linear:
    """Returns a dense layer with float32 parameters that computes in `dtype`.

    The initial weights keep the scale of activations at any width. The usual fixed standard deviation of 0.02 is meant
    for widths near 768: in a narrow ViT tokens would consist almost entirely of their position.
    """
    initial = nnx.initializers.xavier_uniform()
    return Linear(inputs, outputs, use_bias=bias, dtype=dtype, kernel_init=initial, rngs=rngs)


@jax.custom_vjp
def affine(x: Array, kernel: Array, bias: Array | None) -> Array:
    """Returns rows [n, i] times a kernel [i, o], plus a bias [o], if there is one, in their type."""
    y = x @ kernel
    return y if bias is None else y + bias.astype(y.dtype)


def _affine_forward(x: Array, kernel: Array, bias: Array | None) -> tuple[Array, tuple[Array, Array, Array | None]]:
    return affine(x, kernel, bias), (x, kernel, bias)


def _affine_backward(operands: tuple[Array, Array, Array | None], dy: Array) -> tuple[Array, Array, Array | None]:
    x, kernel, bias = operands
    # On CPUs XLA copies the first operand of a product if it has to be transposed, so the narrower one goes first.
    narrow, wide = (x, dy) if x.shape[1] <= dy.shape[1] else (dy, x)
    dkernel = lax.dot_general(narrow, wide, (((0,), (0,)), ((), ())))
    # Of a sum of bfloat16 XLA makes a tree of roundings there, at a fifth of a step's time.
    dbias = None if bias is None else jnp.sum(dy.astype(jnp.float32), axis=0).astype(bias.dtype)
    return dy @ kernel.T, dkernel if narrow is x else dkernel.T, dbias


affine.defvjp(_affine_forward, _affine_backward)
