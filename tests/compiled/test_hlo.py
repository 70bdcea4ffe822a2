"""Reading compiled programs: bytes, exchanges, products and host calls of a text with known answers."""

import pytest

from jepa_jax.compiled.hlo import CompiledProgram, group_size, parse_hlo

HLO = """HloModule jit_step, is_scheduled=true

%body (p: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %p = (s32[], f32[8,4]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[8,4]{1,0} get-tuple-element(%p), index=1
  %y = f32[8,4]{1,0} negate(%x)
  ROOT %t = (s32[], f32[8,4]{1,0}) tuple(%i, %y)
}

%sliced (q: f32[100,4], j: s32[]) -> f32[1,4] {
  %q = f32[100,4]{1,0} parameter(0)
  %j = s32[] parameter(1)
  %z = s32[] constant(0)
  ROOT %d = f32[1,4]{1,0} dynamic-slice(%q, %j, %z), dynamic_slice_sizes={1,4}
}

ENTRY %main (a: f32[8,4], b: f32[100,4], k: s32[]) -> f32[8,4] {
  %a = f32[8,4]{1,0} parameter(0)
  %b = f32[100,4]{1,0} parameter(1)
  %k = s32[] parameter(2)
  %init = (s32[], f32[8,4]{1,0}) tuple(%k, %a)
  %loop = (s32[], f32[8,4]{1,0}) while(%init), body=%body, backend_config={"known_trip_count":{"n":"5"}}
  %v = f32[8,4]{1,0} get-tuple-element(%loop), index=1
  %s = f32[1,4]{1,0} fusion(%b, %k), kind=kLoop, calls=%sliced
  %r = f32[8,4]{1,0} all-reduce(%v), replica_groups=[1,8]<=[8], to_apply=%sum
  %c = (bf16[2,2]{1,0}) custom-call(%v, %r), custom_call_target="__cudnn$conv", metadata={op_name="encoder/conv"}
  %h = () custom-call(%v), custom_call_target="xla_ffi_python_gpu_callback"
  ROOT %o = f32[8,4]{1,0} copy(%r)
}
"""


@pytest.fixture(scope="module")
def module() -> CompiledProgram:
    return parse_hlo(HLO)


def test_loops_move_their_bytes_as_often_as_they_run(module):
    matrix, row = 8 * 4 * 4, 4 * 4
    loop, fusion, reduce, conv, copy = 5 * 2 * matrix, 2 * row + 4, 2 * matrix, 2 * matrix + 8, 2 * matrix
    assert module.bytes_moved() == loop + fusion + reduce + conv + matrix + copy  # the callback reads a matrix


def test_exchanges_are_counted_by_what_a_device_sends(module):
    assert module.collectives() == {"all-reduce": [1, 2 * 7 * 128 // 8]}
    assert group_size("replica_groups={{0,1,2,3},{4,5,6,7}}") == 4
    assert group_size("replica_groups=mesh['x'=8,'y'=2] {'x'}, to_apply=%s") == 8
    assert group_size("replica_groups=mesh['x'=8,'y'=2] {'x':(1)4,'y'}") == 8


def test_products_tell_their_types_and_callbacks_are_found(module):
    (product,) = module.products()
    assert product.kind == "convolution" and product.types == ("f32", "f32") and "encoder" in product.scope
    assert module.host_calls() == ["xla_ffi_python_gpu_callback"]
