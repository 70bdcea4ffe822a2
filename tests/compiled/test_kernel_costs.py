"""Costs of compiled instructions: closed forms for products, convolutions and their gradients, and the bytes moved."""

import jax
import jax.numpy as jnp

from jepa_jax.compiled.hlo import parse_hlo
from jepa_jax.compiled.kernels import kernels_by_name

# As XLA writes it for GPUs: a convolution of 256 images and its gradients, a product inside a fusion, one of cuBLAS.
GPU = """HloModule jit_step

%gemm_computation (p0: bf16[256,64], p1: bf16[64,32]) -> bf16[256,32] {
  %p0 = bf16[256,64]{1,0} parameter(0)
  %p1 = bf16[64,32]{1,0} parameter(1)
  ROOT %dot.9 = bf16[256,32]{1,0} dot(%p0, %p1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%slicing (table: f32[1000,8], i: s32[]) -> f32[1,8] {
  %table = f32[1000,8]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %slice = f32[1,8]{1,0} dynamic-slice(%table, %i, %zero), dynamic_slice_sizes={1,8}
}

ENTRY %main (x: bf16[256,16,16,32]) -> bf16[256,16,16,64] {
  %x = bf16[256,16,16,32]{3,2,1,0} parameter(0)
  %k = bf16[64,3,3,32]{3,2,1,0} parameter(1)
  %a = bf16[256,64]{1,0} parameter(2)
  %b = bf16[64,32]{1,0} parameter(3)
  %t = f32[1000,8]{1,0} parameter(4)
  %n = s32[] parameter(5)
  %conv = (bf16[256,16,16,64]{3,2,1,0}, u8[4096]{0}) custom-call(%x, %k), window={size=3x3 pad=1_1x1_1}, \
dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$convForward"
  %y = bf16[256,16,16,64]{3,2,1,0} get-tuple-element(%conv), index=0
  %dw = (bf16[64,3,3,32]{3,2,1,0}, u8[0]{0}) custom-call(%x, %y), window={size=3x3 pad=1_1x1_1}, \
dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$convBackwardFilter"
  %dx = (bf16[256,16,16,32]{3,2,1,0}, u8[0]{0}) custom-call(%y, %k), window={size=3x3 pad=1_1x1_1}, \
dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$convBackwardInput"
  %gemm_fusion = bf16[256,32]{1,0} fusion(%a, %b), kind=kCustom, calls=%gemm_computation
  %cublas = (bf16[256,32]{1,0}, s8[4194304]{0}) custom-call(%a, %b), custom_call_target="__cublas$gemm", \
backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}
  ROOT %row = f32[1,8]{1,0} fusion(%t, %n), kind=kLoop, calls=%slicing
}
""".replace("\\\n", "")


def test_a_convolution_and_its_gradients_cost_the_same():
    costs = kernels_by_name(parse_hlo(GPU))
    flops = 2 * 256 * 16 * 16 * 64 * 9 * 32
    assert [costs[name].flops for name in ("conv", "dw", "dx")] == [flops] * 3


def test_products_count_inside_fusions_and_libraries_and_scratch_memory_is_no_traffic():
    costs = kernels_by_name(parse_hlo(GPU))
    moved = 2 * (256 * 64 + 64 * 32 + 256 * 32)
    for name in ("gemm_fusion", "cublas"):
        assert (costs[name].flops, costs[name].bytes) == (2 * 256 * 64 * 32, moved)


def test_of_a_table_that_is_only_sliced_the_slice_counts():
    row = kernels_by_name(parse_hlo(GPU))["row"]
    assert (row.flops, row.bytes) == (0, 2 * 8 * 4 + 4)


def test_the_products_of_a_program_compiled_here_are_found():
    def step(a, b):
        return jnp.sum(jnp.tanh(a @ b) @ b.T)

    text = jax.jit(jax.grad(step)).lower(jnp.ones([32, 48]), jnp.ones([48, 16])).compile().as_text()
    assert max(cost.flops for cost in kernels_by_name(parse_hlo(text)).values()) == 2 * 32 * 48 * 16
