"""The layer norm of transformers against flax's own, values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jepa_jax.models.kernels.norm import LayerNorm
from tests.arrays import create, normal


def both(dtype: jnp.dtype, epsilon: float = 1e-6) -> tuple[LayerNorm, nnx.LayerNorm]:
    kinds = (LayerNorm, nnx.LayerNorm)
    ours, theirs = (create(lambda: kind(24, epsilon=epsilon, dtype=dtype, rngs=nnx.Rngs(0))) for kind in kinds)  # noqa: B023
    for module in (ours, theirs):
        module.scale[...] = jnp.asarray(1 + 0.3 * normal(1, (24,)))
        module.bias[...] = jnp.asarray(normal(2, (24,)))
    return ours, theirs


def value_and_gradients(module: nnx.Module, x: jax.Array) -> tuple:
    graph, state = nnx.split(module)
    weights = np.cos(np.arange(x.size, dtype=np.float32)).reshape(x.shape)

    def value(state: nnx.State, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = nnx.merge(graph, state)(x)
        return jnp.sum(weights * y), y

    (of_parameters, of_x), y = jax.jit(jax.grad(value, argnums=(0, 1), has_aux=True))(state, x)
    return y, nnx.to_pure_dict(of_parameters), of_x


@pytest.mark.parametrize("shape", [(24,), (5, 24), (2, 3, 7, 24)])
def test_values_and_gradients_are_those_of_flax(shape):
    x = 2 + 3 * normal(0, shape)
    ours, theirs = (value_and_gradients(module, x) for module in both(jnp.float32))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), ours, theirs)


def test_bfloat16_goes_in_and_comes_out_with_statistics_in_float32():
    x = (2 + 3 * normal(0, (6, 24))).astype(jnp.bfloat16)
    ours, theirs = (value_and_gradients(module, x) for module in both(jnp.bfloat16))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(*map(np.float32, (a, b)), rtol=2e-2, atol=2e-2), ours, theirs)
    assert ours[0].dtype == ours[2].dtype == jnp.bfloat16


def test_a_constant_row_becomes_the_bias_and_has_finite_gradients():
    ours, _ = both(jnp.float32)
    values, gradients, dx = value_and_gradients(ours, np.full((3, 24), 5, np.float32))
    np.testing.assert_allclose(values, np.broadcast_to(ours.bias[...], (3, 24)), atol=1e-6)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((gradients, dx)))
