"""Attention and MLP: the values and gradients of their plain forms, for any length, mask and type."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax._src.cudnn import fused_attention_stablehlo
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from jepa_jax.base.errors import UserError
from jepa_jax.models.kernels import attention as formulations
from jepa_jax.models.kernels.attention import attention, fused_block, self_attention
from jepa_jax.models.kernels.fused_attention import fused_attention
from jepa_jax.models.kernels.linear import row_major
from jepa_jax.models.kernels.mlp import gelu, mlp
from jepa_jax.models.vit import Attention
from jepa_jax.planning.absent_gpus import absent_devices, require_wheels
from jepa_jax.program.step import with_mesh
from jepa_jax.runtime.hardware import load_table, lowering_for
from tests.arrays import create, normal
from tests.stepping import mesh_of


def plain_attention(q, k, v, mask=None):
    return jax.nn.dot_product_attention(q, k, v, mask=None if mask is None else mask[:, None, None, :])


def values_and_gradients(function, *arrays):
    @jax.jit
    def both(*arrays):
        out, backward = jax.vjp(function, *arrays)
        return out, *backward(jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape).astype(out.dtype))

    return both(*arrays)


def heads(length, keys, dtype=jnp.float32, batch=2, width=8):
    shapes = [(batch, length, 3, width), (batch, keys, 3, width), (batch, keys, 3, width)]
    return [(2 * normal(i, shape)).astype(dtype) for i, shape in enumerate(shapes)]


def assert_close(one, other, tolerance):
    for x, y in zip(one, other, strict=True):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * max(1.0, np.abs(y).max()))


@pytest.mark.parametrize("length, keys", [(1, 1), (65, 7), (300, 300)])
def test_attention_of_any_length_has_the_values_and_gradients_of_the_plain_form(length, keys):
    arrays = heads(length, keys)
    assert_close(values_and_gradients(attention, *arrays), values_and_gradients(plain_attention, *arrays), 1e-5)


@jax.jit
def masked_both_ways(q, k, v, mask):
    """Returns values and gradients of our attention and of the plain form under a mask."""
    ours = values_and_gradients(lambda *heads: attention(*heads, mask), q, k, v)
    return ours, values_and_gradients(lambda *heads: plain_attention(*heads, mask), q, k, v)


@settings(max_examples=20)
@given(st.integers(0, 2**20 - 1))
def test_keys_outside_the_mask_are_not_attended_to(bits):
    q, k, v = heads(3, 20)
    mask = np.array([[bits >> i & 1 for i in range(20)], [1] * 20], bool)
    mask[:, 0] = True
    got, plain = masked_both_ways(q, k, v, mask)
    assert_close(got, plain, 1e-5)
    rubbish = np.where(mask[..., None, None], 0, 1e3).astype(np.float32)
    np.testing.assert_array_equal(masked_both_ways(q, k + rubbish, v + rubbish, mask)[0][0], got[0])


def test_a_query_without_any_key_has_no_nan():
    q, k, v = heads(3, 4)
    nothing = jnp.zeros((2, 4), bool)
    got = values_and_gradients(lambda q, k, v: attention(q, k, v, nothing), q, k, v)
    assert all(np.isfinite(x).all() for x in got)


def test_attention_in_bfloat16_is_as_close_as_the_type_allows():
    exact = values_and_gradients(plain_attention, *heads(65, 65))
    got = values_and_gradients(attention, *heads(65, 65, jnp.bfloat16))
    assert got[0].dtype == jnp.bfloat16
    assert_close(got, exact, 0.03)  # bfloat16 has 8 bits: 0.4 % per rounding


@pytest.mark.parametrize("dtype, tolerance", [(jnp.float32, 1e-6), (jnp.bfloat16, 0.01)])
def test_gelu_is_exact_with_its_exact_slope(dtype, tolerance):
    x = np.linspace(-12, 12, 4001, dtype=np.float32).astype(dtype)
    plain = values_and_gradients(lambda x: jax.nn.gelu(x.astype(jnp.float32), approximate=False), x)
    assert_close(values_and_gradients(gelu, x), plain, tolerance)


def test_the_mlp_has_the_values_and_gradients_of_the_plain_form():
    x, up, down = (normal(i, shape) for i, shape in enumerate([(2, 5, 8), (8, 32), (32, 8)]))
    ours = values_and_gradients(lambda x, up, down: mlp(x, lambda t: t @ up, lambda t: t @ down), x, up, down)
    plain = values_and_gradients(lambda x, up, down: jax.nn.gelu(x @ up, approximate=False) @ down, x, up, down)
    assert_close(ours, plain, 1e-5)


def test_the_gradient_of_queries_keys_and_values_is_joined_once():
    graph, state = nnx.split(create(lambda: Attention(48, 3, dtype=jnp.float32, rngs=nnx.Rngs(0))))
    gradient = jax.grad(lambda state, x: jnp.sum(jnp.square(nnx.merge(graph, state)(x))), argnums=(0, 1))
    program = jax.jit(gradient).lower(state, jnp.ones((4, 20, 48))).compile().as_text().partition("ENTRY")[2]
    assert sum("/concatenate" in line for line in program.splitlines()) == 1


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_eight_devices_do_not_exchange_gradients_of_tokens(dtype):
    graph, state = nnx.split(create(lambda: Attention(48, 3, dtype=dtype, rngs=nnx.Rngs(0))))
    gradient = jax.grad(lambda state, x: jnp.sum(jnp.square(nnx.merge(graph, state)(x).astype(jnp.float32))))
    mesh = mesh_of(8)
    everywhere, split = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
    x = jax.device_put(jnp.ones((16, 20, 48)), split)
    lowered = jax.jit(with_mesh(mesh, gradient), out_shardings=everywhere).lower(jax.device_put(state, everywhere), x)
    assert "all-gather" not in lowered.compile().as_text()


def test_eight_devices_attend_as_one_does():
    arrays = heads(17, 17, batch=8)
    split = NamedSharding(mesh_of(8), PartitionSpec(("data", "fsdp")))
    both = [
        jax.jit(lambda *a: values_and_gradients(attention, *a))(*x) for x in (arrays, jax.device_put(arrays, split))
    ]
    assert_close(both[0], both[1], 1e-5)
    assert not both[1][0].sharding.is_fully_replicated


def kernel_attention(q, k, v, block):
    """Returns what the kernel for GPUs computes: its own operations, one after the other."""
    return fused_attention(jnp.concatenate([q, k, v], axis=2), block, True)


@pytest.mark.parametrize("length, block, width", [(64, 64, 16), (65, 16, 12), (78, 32, 16)])
def test_the_kernel_for_gpus_has_the_values_and_gradients_of_the_plain_form(length, block, width):
    arrays = heads(length, length, batch=1, width=width)
    fused = functools.partial(kernel_attention, block=block)
    assert_close(values_and_gradients(fused, *arrays), values_and_gradients(plain_attention, *arrays), 1e-5)


def test_gradients_of_the_kernel_in_bfloat16_are_as_close_as_the_type_allows():
    """Against float32 on the same rounded inputs: a root mean square of 0.4 % is one rounding of the result."""
    rounded = heads(65, 65, jnp.bfloat16, width=16)
    exact = values_and_gradients(plain_attention, *(x.astype(jnp.float32) for x in rounded))
    got = values_and_gradients(functools.partial(kernel_attention, block=32), *rounded)
    for x, y in zip(got, exact, strict=True):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        assert np.sqrt(np.mean((x - y) ** 2) / np.mean(y**2)) < 0.006


@pytest.mark.parametrize(
    "gpu, dtype, width, block",
    [
        ("rtx4090", jnp.float32, 64, 64),
        ("rtx4090", jnp.float32, 80, 32),  # 64 would take 114,944 of 101,376 bytes: Triton pads widths to powers of 2
        ("rtx4090", jnp.bfloat16, 128, 64),
        ("rtx4090", jnp.bfloat16, 256, 32),
        ("rtx4090", jnp.float32, 256, 16),
        ("a100-80", jnp.float32, 128, 64),
        ("a100-80", jnp.float32, 256, 32),
    ],
)
def test_blocks_of_the_kernel_fit_the_shared_memory_of_the_gpu(gpu, dtype, width, block):
    with lowering_for(load_table()[gpu]):
        assert fused_block(196, width, jnp.dtype(dtype).itemsize) == block


@pytest.mark.parametrize("length, block", [(17, 32), (64, 64), (65, 32), (78, 32), (196, 64)])
def test_a_block_that_covers_much_beyond_the_last_token_gives_way_to_a_smaller_one(length, block):
    with lowering_for(load_table()["a100-80"]):
        assert fused_block(length, 64, 2) == block


@pytest.mark.parametrize("implementation", ["auto", "kernel", "xla", "cudnn"])
def test_the_implementation_is_the_one_that_is_named(implementation):
    card = load_table()["a100-80"]
    x = jax.ShapeDtypeStruct((2, 65, 6, 64), jnp.bfloat16)
    with lowering_for(card):  # cuDNN cannot be asked about a GPU that is not there
        program = str(jax.make_jaxpr(functools.partial(self_attention, implementation=implementation))(x))
    assert ("attention_forward" in program) == (implementation != "xla")


@pytest.fixture
def a100_with_cudnn(monkeypatch):
    """An A100 with cuDNN in this machine, as far as tracing and lowering ask for it."""
    monkeypatch.setattr(formulations, "is_gpu_here", lambda: True)
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(fused_attention_stablehlo, "check_compute_capability", lambda least: float(least) <= 8.0)
    with lowering_for(load_table()["a100-80"]):
        yield


def lowered_for_gpus(implementation, dtype, width, length=64):
    step = jax.grad(lambda x: jnp.sum(self_attention(x, implementation).astype(jnp.float32)))
    x = jax.ShapeDtypeStruct((2, length, 6, width), dtype)
    return jax.jit(step).trace(x).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    "implementation, dtype, width, length, by_cudnn",
    [
        ("auto", jnp.bfloat16, 8, 64, True),
        ("auto", jnp.float16, 80, 78, True),
        ("cudnn", jnp.bfloat16, 128, 64, True),
        ("auto", jnp.bfloat16, 64, 65, False),  # JAX refuses gradients of odd lengths
        ("auto", jnp.bfloat16, 136, 64, False),
        ("auto", jnp.bfloat16, 36, 64, False),
        ("auto", jnp.float32, 64, 64, False),
        ("kernel", jnp.bfloat16, 64, 64, False),
    ],
)
def test_cudnn_attends_on_a_gpu_of_this_machine_to_the_heads_that_it_takes(
    a100_with_cudnn, implementation, dtype, width, length, by_cudnn
):
    program = lowered_for_gpus(implementation, dtype, width, length)
    calls = ("__cudnn$fmhaSoftmax(", "__cudnn$fmhaSoftmaxBackward("), ("attention_forward", "attention_backward")
    assert all(call in program for call in calls[not by_cudnn])
    assert not any(call in program for call in calls[by_cudnn])


def test_eight_gpus_attend_by_cudnn_to_their_own_images(a100_with_cudnn):
    """XLA cannot divide the call itself: a call that it is asked to divide is named CustomSPMDPartitioning."""
    step = with_mesh(mesh_of(8), jax.grad(lambda x: jnp.sum(self_attention(x).astype(jnp.float32))))
    x = jax.ShapeDtypeStruct((8, 64, 6, 64), jnp.bfloat16)
    program = jax.jit(step).trace(x).lower(lowering_platforms=("cuda",)).as_text()
    assert "__cudnn$fmhaSoftmaxBackward(" in program and "CustomSPMDPartitioning" not in program


def test_heads_that_cudnn_was_asked_for_and_does_not_take_are_named(a100_with_cudnn):
    with pytest.raises(UserError, match="does not take 64 tokens with heads of 64 numbers in float32; use auto"):
        lowered_for_gpus("cudnn", jnp.float32, 64)


def test_what_cudnn_computes_has_the_values_and_gradients_of_the_plain_form(a100_with_cudnn):
    arrays = heads(18, 18, jnp.bfloat16)
    mixed = functools.partial(jnp.concatenate, axis=2)
    got = values_and_gradients(lambda *heads: self_attention(mixed(heads)), *arrays)
    assert_close(got, values_and_gradients(plain_attention, *arrays), 0.02)


def test_tokens_have_one_layout_on_gpus_and_none_is_asked_for_on_cpus():
    traced = jax.jit(jax.grad(lambda x: jnp.sum(jnp.square(row_major(x))))).trace(jnp.ones((2, 3, 4)))
    layouts = [traced.lower(lowering_platforms=(name,)).as_text().count("LayoutConstraint") for name in ("cuda", "cpu")]
    assert layouts == [2, 0]  # of the tokens and of their gradient


@pytest.mark.parametrize("gpu, dtype, width", [("t4", jnp.bfloat16, 16), ("rtx4090", jnp.float32, 128)])
def test_attention_compiles_for_gpus_without_triton_and_with_little_shared_memory(compiler_options, gpu, dtype, width):
    card = load_table()[gpu]
    layout = SingleDeviceSharding(absent_devices(card, "1x1x1")[0])
    x = jax.ShapeDtypeStruct((1, 64, 1, width), dtype, sharding=layout)
    with lowering_for(card):
        lowered = jax.jit(lambda *heads: values_and_gradients(attention, *heads)).lower(x, x, x)
    assert ("attention_forward" in lowered.compile(compiler_options=compiler_options).as_text()) == (gpu != "t4")


@pytest.fixture
def compiler_options():
    try:
        return {"xla_gpu_cuda_data_dir": str(require_wheels()), "xla_gpu_enable_triton_gemm": False}
    except UserError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("devices", [1, 8])
def test_no_matrix_of_scores_is_written_on_a_gpu(compiler_options, devices):
    card = load_table()["a100-80"]
    absent = absent_devices(card, f"1x1x{devices}")
    mesh = jax.sharding.Mesh(np.array(absent).reshape(devices, 1), ("data", "fsdp"))
    layout = NamedSharding(mesh, PartitionSpec(("data", "fsdp"))) if devices > 1 else SingleDeviceSharding(absent[0])
    x = jax.ShapeDtypeStruct((8, 196, 2, 64), jnp.bfloat16, sharding=layout)

    def step(q, k, v):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return values_and_gradients(attention, q, k, v)

    with lowering_for(card):
        lowered = jax.jit(step).lower(x, x, x)
    text = lowered.compile(compiler_options=compiler_options).as_text()
    assert "triton" in text
    for written in ("196,196]", "256,256]", "196,256]", "256,196]"):
        assert written not in text
    assert "all-gather" not in text


def test_a_process_with_gpus_attends_on_its_cpu_too_and_light_remat_runs_no_kernel_twice():
    def mixed(q, k, v):
        return self_attention(jnp.concatenate([q, k, v], axis=2))

    arrays, kept = heads(17, 17), jax.checkpoint_policies.save_only_these_names("product", "statistic")
    with lowering_for(load_table()["a100-80"]):
        assert_close(values_and_gradients(mixed, *arrays), values_and_gradients(plain_attention, *arrays), 1e-5)
        light = jax.checkpoint(lambda *heads: jnp.sum(jnp.sin(mixed(*heads))), policy=kept)
        lowered = jax.jit(jax.grad(light)).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert lowered.count("attention_forward_32") == lowered.count("attention_backward_32")
