"""conv2d equals XLA's convolution in value and gradient, on every platform and any number of devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jepa_jax.compiled.flops import Rules, count_flops
from jepa_jax.models.kernels import conv as conv_module
from jepa_jax.models.kernels.conv import conv2d, max_pool
from tests.arrays import normal

# kernel, stride, height, width, inputs, outputs, padding
CASES = (
    (1, 1, 5, 6, 3, 8, 0),
    (1, 2, 8, 7, 16, 8, 0),
    (3, 1, 8, 8, 3, 16, 1),
    (3, 1, 8, 8, 16, 16, 1),
    (3, 1, 7, 5, 16, 8, 0),
    (3, 1, 16, 32, 64, 64, 1),
    (3, 1, 24, 23, 64, 80, ((0, 2), (1, 0))),
    (3, 2, 8, 8, 16, 32, 1),
    (3, 3, 8, 9, 4, 8, ((2, 1), (0, 3))),
    (4, 1, 7, 8, 8, 8, ((1, 2), (1, 2))),
    (4, 2, 8, 9, 3, 8, ((1, 1), (1, 2))),
    (6, 1, 9, 8, 3, 16, 0),
    (6, 3, 11, 12, 3, 8, 0),
    (7, 1, 8, 7, 8, 8, 3),
    (7, 2, 12, 13, 3, 16, 3),
    (7, 3, 9, 8, 8, 8, ((4, 2), (8, 3))),
)


def reference(x, kernel, *, stride=1, padding):
    pads = ((padding, padding), (padding, padding)) if isinstance(padding, int) else padding
    groups = x.shape[-1] // kernel.shape[2]
    return lax.conv_general_dilated(
        x, kernel, (stride, stride), pads, dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=groups
    )


def value_and_gradients(conv, x, kernel):
    y, pullback = jax.vjp(conv, x, kernel)
    dy = jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape).astype(y.dtype)
    return y, *pullback(dy)


def arrays(case, dtype=np.float32):
    window, _, height, width, inputs, outputs, _ = case
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, height, width, inputs)).astype(np.float32)
    kernel = rng.standard_normal((window, window, inputs, outputs)).astype(np.float32)
    return jnp.asarray(x, dtype), jnp.asarray(kernel, dtype)


def relative_error(actual, expected):
    actual, expected = np.asarray(actual, np.float32), np.asarray(expected, np.float32)
    assert actual.shape == expected.shape
    return np.abs(actual - expected).max() / np.abs(expected).max()


def test_value_and_gradients_equal_the_plain_convolution():
    # One compilation for all cases, and a quick one.
    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def all_cases(inputs):
        def run(conv, case, arrays):
            return value_and_gradients(functools.partial(conv, stride=case[1], padding=case[-1]), *arrays)

        pairs = zip(CASES, inputs, strict=True)
        return [(run(conv2d, case, arrays), run(reference, case, arrays)) for case, arrays in pairs]

    for case, (actual, expected) in zip(CASES, all_cases([arrays(case) for case in CASES]), strict=True):
        for name, a, e in zip(("y", "dx", "dkernel"), actual, expected, strict=True):
            assert relative_error(a, e) < 1e-5, (case, name)


@pytest.mark.parametrize("stride, padding", [(1, 1), (2, 0)])
def test_a_depthwise_convolution_equals_the_plain_one(stride, padding):
    x, _ = arrays((3, 1, 7, 6, 8, 8, 1))
    kernel = jnp.asarray(np.random.default_rng(1).standard_normal((3, 3, 1, 8)), jnp.float32)
    both = (functools.partial(conv, stride=stride, padding=padding) for conv in (conv2d, reference))
    actual, expected = (jax.jit(functools.partial(value_and_gradients, conv))(x, kernel) for conv in both)
    assert all(relative_error(a, e) < 1e-5 for a, e in zip(actual, expected, strict=True))


def test_channels_that_do_not_fit_the_kernel_are_refused():
    with pytest.raises(TypeError, match="8 channels"):
        conv2d(jnp.zeros((1, 4, 4, 8)), jnp.zeros((3, 3, 2, 8)), padding=1)


def test_bfloat16_stays_bfloat16_and_accumulates_in_float32():
    case = (3, 1, 8, 8, 64, 16, 1)
    x, kernel = arrays(case, jnp.bfloat16)
    actual = jax.jit(functools.partial(value_and_gradients, functools.partial(conv2d, padding=1)))(x, kernel)
    exact = jax.jit(functools.partial(value_and_gradients, functools.partial(reference, padding=1)))(
        *(a.astype(jnp.float32) for a in (x, kernel))
    )
    for a, e in zip(actual, exact, strict=True):
        assert a.dtype == jnp.bfloat16
        assert relative_error(a, e) < 2**-7  # one rounding of the result (and of dy), none of the sums


def test_mixed_types_are_refused():
    with pytest.raises(TypeError, match="bfloat16"):
        conv2d(jnp.zeros((1, 4, 4, 3)), jnp.zeros((3, 3, 3, 4), jnp.bfloat16), padding=1)


def two_layers(x, first, second):
    """Scan, remat and both strides: what a model does with a convolution."""

    @jax.checkpoint
    def layer(x, kernel):
        return jax.nn.relu(conv2d(x, kernel, padding=1)), None

    x, _ = lax.scan(layer, x, jnp.stack([first, first]))
    return jnp.mean(jnp.square(conv2d(x, second, stride=2, padding=1)))


def lowered_for(platform, dtype=jnp.bfloat16):
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=dtype)
    operands = shape((8, 8, 8, 16)), shape((3, 3, 16, 16)), shape((3, 3, 16, 32))
    gradient = jax.jit(jax.grad(two_layers, argnums=(0, 1, 2)))
    return gradient.trace(*operands).lower(lowering_platforms=(platform,)).as_text()


def test_a_gpu_gets_plain_convolutions_without_casts():
    text = lowered_for("cuda")
    # Forward, recomputed forward and two gradients in the scan; forward and two gradients behind it.
    assert text.count("stablehlo.convolution") == 7
    assert "dot_general" not in text
    convolutions = [line for line in text.splitlines() if "stablehlo.convolution" in line]
    assert not any("f32" in line for line in convolutions)


def test_a_gpu_gets_eight_channels_of_16_bits_where_there_are_three():
    """XLA gives cuDNN the channels that it is given, and matrix units take eight at a time."""

    def text(dtype):
        shape = functools.partial(jax.ShapeDtypeStruct, dtype=dtype)
        conv = jax.jit(functools.partial(value_and_gradients, functools.partial(conv2d, padding=1)))
        return conv.trace(shape((2, 8, 8, 3)), shape((3, 3, 3, 16))).lower(lowering_platforms=("cuda",)).as_text()

    assert "2x8x8x8xbf16" in text(jnp.bfloat16)
    assert "2x8x8x8xf32" not in text(jnp.float32)


@pytest.mark.parametrize("window, stride, padding", [(3, 1, 1), (7, 2, 3)])
def test_filled_channels_change_no_number_and_count_no_operation(window, stride, padding):
    x, kernel = arrays((window, stride, 9, 8, 3, 16, padding))
    pads = ((padding, padding), (padding, padding))
    both = conv_module._filled_conv, conv_module._plain_conv
    filled, plain = (value_and_gradients(functools.partial(c, stride=stride, pads=pads), x, kernel) for c in both)
    assert all(relative_error(a, e) < 1e-6 for a, e in zip(filled, plain, strict=True))
    halves = [a.astype(jnp.bfloat16) for a in (x, kernel)]
    conv = functools.partial(conv2d, stride=stride, padding=padding)
    counted = [count_flops(conv, *halves, rules=Rules(platform=platform)) for platform in ("cuda", "tpu")]
    assert counted[0] == counted[1]


def test_a_cpu_gets_only_matrix_products():
    text = lowered_for("cpu")
    assert "stablehlo.convolution" not in text
    assert "dot_general" in text


def test_eight_devices_equal_one_and_never_gather_activations():
    rng = np.random.default_rng(0)
    shapes = (16, 8, 8, 64), (3, 3, 64, 64), (3, 3, 64, 32)
    x, first, second = (jnp.asarray(rng.standard_normal(s) * 0.1, jnp.float32) for s in shapes)
    gradient = jax.jit(jax.value_and_grad(two_layers, argnums=(0, 1, 2)))
    one = gradient(x, first, second)

    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    spread, everywhere = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("data",), ()))
    operands = jax.device_put((x, first, second), (spread, everywhere, everywhere))
    compiled = gradient.lower(*operands).compile()
    text = compiled.as_text()
    assert "all-reduce" in text
    for forbidden in ("all-gather", "all-to-all", "collective-permute"):
        assert forbidden not in text
    for a, e in zip(jax.tree.leaves(compiled(*operands)), jax.tree.leaves(one), strict=True):
        assert relative_error(a, e) < 1e-5


def test_max_pool_equals_the_window_reduction():
    def reference_pool(x):
        return lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), ((0, 0), (1, 1), (1, 1), (0, 0)))

    @jax.jit
    def both(x, dy):
        pools = functools.partial(max_pool, window=3, stride=2, padding=1), reference_pool
        return [(pool(x), jax.vjp(pool, x)[1](dy)[0]) for pool in pools]

    x, dy = normal(0, (2, 9, 12, 8)), normal(1, (2, 5, 6, 8))
    actual, expected = both(x, dy)
    np.testing.assert_array_equal(actual[0], expected[0])
    np.testing.assert_allclose(actual[1], expected[1], rtol=1e-5, atol=1e-5)
