"""Kernels of a program with known answers: products, other arithmetic, traffic, what XLA runs again."""

import pytest

from jepa_jax.compiled.hlo import parse_hlo
from jepa_jax.compiled.kernels import ATTENTION, CONVOLUTION, ELEMENTWISE, MATMUL, read_kernels

HLO = """HloModule jit_step, is_scheduled=true

%fused (p: f32[8,4], q: f32[8,4]) -> f32[8,4] {
  %p = f32[8,4]{1,0} parameter(0)
  %q = f32[8,4]{1,0} parameter(1)
  %e = f32[8,4]{1,0} exponential(%p)
  ROOT %s = f32[8,4]{1,0} add(%e, %q)
}

ENTRY %main (x: bf16[2,8,8,16], k: bf16[32,3,3,16], a: f32[8,4], b: f32[4,6]) -> f32[8,4] {
  %x = bf16[2,8,8,16]{3,2,1,0} parameter(0)
  %k = bf16[32,3,3,16]{3,2,1,0} parameter(1)
  %a = f32[8,4]{1,0} parameter(2)
  %b = f32[4,6]{1,0} parameter(3)
  %dy = bf16[2,4,4,32]{3,2,1,0} parameter(4)
  %t = bf16[2,60,9,8]{3,2,1,0} parameter(5)
  %o = bf16[2,60,3,8]{3,2,1,0} parameter(6)
  %c = (bf16[2,4,4,32]{3,2,1,0}, u8[0]{0}) custom-call(%x, %k), window={size=3x3 stride=2x2 pad=1_1x1_1}, dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$convForward"
  %i = (bf16[2,8,8,16]{3,2,1,0}, u8[0]{0}) custom-call(%dy, %k), window={size=3x3 stride=2x2 pad=1_1x1_1}, dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$convBackwardInput"
  %f = (bf16[32,3,3,16]{3,2,1,0}, u8[0]{0}) custom-call(%x, %dy), window={size=3x3 stride=2x2 pad=1_1x1_1}, dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$convBackwardFilter"
  %m = (f32[8,6]{1,0}, s8[4194304]{0}) custom-call(%a, %b), custom_call_target="__cublas$lt$matmul", backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}
  %h = (bf16[2,60,3,8]{3,2,1,0}, f32[2,3,64]{2,1,0}) custom-call(%t), custom_call_target="__gpu$xla.gpu.triton", metadata={op_name="jit(step)/jvp()/attention_forward_32/pallas_call"}
  %g = bf16[2,60,9,8]{3,2,1,0} custom-call(%t, %o), custom_call_target="__gpu$xla.gpu.triton", metadata={op_name="jit(step)/transpose(jvp())/attention_backward_32/pallas_call"}
  %u = f32[8,4]{1,0} fusion(%a, %a), kind=kLoop, calls=%fused
  ROOT %u.remat = f32[8,4]{1,0} fusion(%a, %a), kind=kLoop, calls=%fused
}
"""  # noqa: E501


@pytest.fixture(scope="module")
def kernels():
    return read_kernels(parse_hlo(HLO))


def of_kind(kernels, kind):
    return [kernel for kernel in kernels if kernel.kind == kind]


def test_a_convolution_and_both_of_its_gradients_have_the_same_operations(kernels):
    flops = 2 * (2 * 4 * 4 * 32) * 9 * 16
    (convolution,) = of_kind(kernels, CONVOLUTION)  # they also move the same bytes, so they are equal kernels
    assert (convolution.flops, convolution.runs, convolution.dtype) == (flops, 3, "bf16")


def test_the_workspace_of_a_matrix_product_is_no_traffic(kernels):
    (matmul,) = of_kind(kernels, MATMUL)
    assert matmul.flops == 2 * 8 * 4 * 6 and matmul.dtype == "f32"
    assert matmul.bytes == 4 * (8 * 4 + 4 * 6 + 8 * 6)


def test_the_products_and_the_traffic_of_attention_kernels_count(kernels):
    forward, backward = of_kind(kernels, ATTENTION)
    product, tensor = 2 * 2 * 3 * 64**2 * 8, 2 * (2 * 60 * 3 * 8)  # blocks of 32 cover 64 tokens
    assert (forward.flops, backward.flops) == (2 * product, 5 * product)
    assert forward.bytes == 4 * tensor + 4 * 2 * 3 * 64


def test_arithmetic_of_fusions_counts_and_what_xla_runs_again_is_known(kernels):
    (fused,) = of_kind(kernels, ELEMENTWISE)
    assert fused.operations == 8 * 4 * (8 + 1)  # an exponential and an addition
    assert (fused.runs, fused.recomputed) == (2, 1)
