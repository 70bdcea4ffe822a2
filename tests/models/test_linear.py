"""The dense layer of transformers against flax's own, values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jepa_jax.models.linear import Linear


def value_and_gradients(kind: type[nnx.Linear], outputs: int, bias: bool, dtype: jnp.dtype, x: jax.Array) -> tuple:
    module = kind(x.shape[-1], outputs, use_bias=bias, dtype=dtype, rngs=nnx.Rngs(0))
    if bias:
        module.bias[...] = jax.random.normal(jax.random.key(2), (outputs,))
    graph, state = nnx.split(module)
    y = module(x)
    weights = jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape)

    def value(state: nnx.State, x: jax.Array) -> jax.Array:
        return jnp.sum(weights * nnx.merge(graph, state)(x))

    return y, *(jax.tree.leaves(each) for each in jax.grad(value, argnums=(0, 1))(state, x))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape, outputs", [((12,), 5), ((7, 12), 30), ((2, 3, 5, 12), 12)])
def test_values_and_gradients_are_those_of_flax(shape, outputs, bias):
    x = jax.random.normal(jax.random.key(0), shape)
    ours, theirs = (value_and_gradients(kind, outputs, bias, jnp.float32, x) for kind in (Linear, nnx.Linear))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), ours, theirs)


def test_bfloat16_goes_in_and_comes_out_and_gradients_are_float32():
    x = jax.random.normal(jax.random.key(0), (40, 12)).astype(jnp.bfloat16)
    ours, theirs = (value_and_gradients(kind, 8, True, jnp.bfloat16, x) for kind in (Linear, nnx.Linear))
    assert [leaf.dtype for leaf in jax.tree.leaves(ours)] == [leaf.dtype for leaf in jax.tree.leaves(theirs)]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(*map(np.float32, (a, b)), rtol=3e-2, atol=3e-2), ours, theirs)


def test_on_cpus_the_gradient_of_the_bias_is_not_rounded_to_bfloat16():
    layer = Linear(4, 3, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    gradient = nnx.grad(lambda layer: jnp.sum(layer(jnp.ones((3001, 4))).astype(jnp.float32)))(layer)
    np.testing.assert_array_equal(gradient.bias[...], 3001)
