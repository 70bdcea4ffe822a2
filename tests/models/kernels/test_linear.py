"""The dense layer of transformers against flax's own, values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jepa_jax.models.kernels.linear import Linear, affine
from tests.arrays import create, normal


def value_and_gradients(kind: type[nnx.Linear], outputs: int, bias: bool, dtype: jnp.dtype, x: jax.Array) -> tuple:
    module = create(lambda: kind(x.shape[-1], outputs, use_bias=bias, dtype=dtype, rngs=nnx.Rngs(0)))
    if bias:
        module.bias[...] = jnp.asarray(normal(2, (outputs,)))
    graph, state = nnx.split(module)

    def value(state: nnx.State, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = nnx.merge(graph, state)(x)
        return jnp.sum(jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape) * y), y

    gradients, y = jax.jit(jax.grad(value, argnums=(0, 1), has_aux=True))(state, x)
    return y, *map(jax.tree.leaves, gradients)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape, outputs", [((12,), 5), ((7, 12), 30), ((2, 3, 5, 12), 12)])
def test_values_and_gradients_are_those_of_flax(shape, outputs, bias):
    x = normal(0, shape)
    ours, theirs = (value_and_gradients(kind, outputs, bias, jnp.float32, x) for kind in (Linear, nnx.Linear))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), ours, theirs)


def test_bfloat16_goes_in_and_comes_out_and_gradients_are_float32():
    x = normal(0, (40, 12)).astype(jnp.bfloat16)
    ours, theirs = (value_and_gradients(kind, 8, True, jnp.bfloat16, x) for kind in (Linear, nnx.Linear))
    assert [leaf.dtype for leaf in jax.tree.leaves(ours)] == [leaf.dtype for leaf in jax.tree.leaves(theirs)]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(*map(np.float32, (a, b)), rtol=3e-2, atol=3e-2), ours, theirs)


def test_on_cpus_gradients_of_parameters_are_not_rounded_to_bfloat16():
    layer = create(lambda: Linear(4, 3, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    gradient = nnx.jit(nnx.grad(lambda layer: jnp.sum(layer(jnp.ones((3001, 4))).astype(jnp.float32))))(layer)
    np.testing.assert_array_equal(gradient.bias[...], 3001)
    np.testing.assert_array_equal(gradient.kernel[...], 3001)


@pytest.mark.parametrize(("dtype", "error"), [(jnp.bfloat16, 3e-2), (jnp.float32, 1e-5)])
@pytest.mark.parametrize("outputs", [16, 200])  # less than the inputs, and more
def test_a_compiled_layer_may_have_its_operands_and_results_transposed(outputs, dtype, error):
    kernel = normal(0, (64, outputs))

    def run(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return jnp.swapaxes(affine(jnp.swapaxes(x, 1, 2), kernel, None), 1, 2).astype(jnp.float32)

    def wide(x: jax.Array, kernel: jax.Array) -> jax.Array:
        x, kernel = (each.astype(dtype).astype(jnp.float32) for each in (x, kernel))
        return jnp.einsum("bct,co->bot", x, kernel)

    x = normal(1, (4, 64, 70)).astype(dtype)
    ours, exact = (
        jax.jit(jax.value_and_grad(lambda x, kernel, run=run: jnp.sum(jnp.sin(run(x, kernel))), argnums=(0, 1)))
        for run in (run, wide)
    )
    scale = np.sqrt(4 * 70 * outputs)
    got, expected = ours(x, kernel / 64), exact(x, kernel / 64)
    np.testing.assert_allclose(got[0] / scale, expected[0] / scale, atol=error / 3)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(*map(np.float32, (a, b)), atol=error * np.abs(np.float32(b)).max()),
        got[1],
        expected[1],
    )


@pytest.mark.parametrize("parameters", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize("inputs", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
def test_types_are_those_of_flax(dtype, inputs, parameters):
    def types(kind: type[nnx.Linear]) -> list:
        layer = nnx.eval_shape(lambda: kind(6, 8, dtype=dtype, param_dtype=parameters, rngs=nnx.Rngs(0)))
        gradient = nnx.grad(lambda layer, x: jnp.sum(layer(x).astype(jnp.float32)), argnums=(0, 1))
        x = jax.ShapeDtypeStruct((5, 6), inputs)
        made = nnx.eval_shape(lambda layer, x: (layer(x), gradient(layer, x)), layer, x)
        return [leaf.dtype for leaf in jax.tree.leaves(made)]

    assert types(Linear) == types(nnx.Linear)


def test_double_precision_is_kept():
    with jax.enable_x64(True):
        x, kernel = (jax.random.normal(jax.random.key(i), (6, 6), jnp.float64) for i in range(2))
        np.testing.assert_allclose(affine(x, kernel, None), x @ kernel, rtol=1e-13)
