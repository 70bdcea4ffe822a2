"""The peak of a program, from notes of XLA with known answers, in the forms that they have had."""

import pytest

from jepa_jax.base.errors import UserError
from jepa_jax.compiled.buffers import ARGUMENTS, BACKWARD, KEPT, OUTPUTS, read_peak, short_scope
from jepa_jax.compiled.hlo import parse_hlo

HLO = """HloModule jit_step

ENTRY %main (x: f32[100]) -> f32[] {
  %x = f32[100]{0} parameter(0), metadata={op_name="x"}
  %a = f32[50]{0} slice(%x), slice={[0:50]}, metadata={op_name="jit(step)/jvp(f)/slice" stack_frame_id=1}
  %b = f32[25]{0} slice(%a), slice={[0:25]}, metadata={op_name="jit(step)/transpose(jvp(f))/slice" stack_frame_id=1}
  %c = f32[10]{0} slice(%b), slice={[0:10]}, metadata={op_name="jit(step)/optimizer/slice"}
  ROOT %o = f32[] constant(0)
}
"""
LIVE = """BufferLiveRange:
    a{}:1-4
    b{}:2-3
    c{}:5-6
"""
BUFFERS = """allocation 0: size 400, parameter 0, shape |f32[100]| at ShapeIndex {}:
 value: <3 x @0> (size=400,offset=0): f32[100]{0}
allocation 1: size 4, output shape is |f32[]|, maybe-live-out:
 value: <9 o @0> (size=4,offset=0): f32[]
allocation 2: size 300, preallocated-temp:
 value: <4 a @0> (size=200,offset=0): f32[50]{0}
 value: <5 b @0> (size=100,offset=200): f32[25]{0}
 value: <6 c @0> (size=40,offset=0): f32[10]{0}
"""


def peak_of(folder, buffers):
    (folder / "module.after_optimizations-live-range.txt").write_text(LIVE)
    (folder / "module.after_optimizations-buffer-assignment.txt").write_text(buffers)
    return read_peak(folder, parse_hlo(HLO), {1: "model.py:7"})


def test_values_that_live_at_the_fullest_moment_are_the_peak(tmp_path):
    peak = peak_of(tmp_path, BUFFERS)
    assert peak.totals(by="group") == {ARGUMENTS: 400, KEPT: 200, BACKWARD: 100, OUTPUTS: 4}
    assert peak.bytes == 704 and peak.totals(by="source")["model.py:7"] == 300


@pytest.mark.parametrize("change", [("parameter 0", "color 0, parameter 0"), (" value: <3 x @0>", " buffer: x")])
def test_arguments_are_known_where_notes_have_another_form(tmp_path, change):
    assert peak_of(tmp_path, BUFFERS.replace(*change)).totals(by="group")[ARGUMENTS] == 400


def test_a_compiler_without_notes_is_named(tmp_path):
    with pytest.raises(UserError, match="XLA wrote no notes about its buffers"):
        read_peak(tmp_path, parse_hlo(HLO), {})


def test_scopes_are_shown_without_transformations():
    assert short_scope("jit(step)/transpose(jvp(encoder))/dot_general") == "step/encoder/dot_general"
