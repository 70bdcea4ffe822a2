"""Device time by phase: names are understood, nesting is not counted twice, devices and command buffers are handled."""

import pathlib
import time
from types import SimpleNamespace

import jax
import pytest

from jepa_jax.profiling.device_time import (
    NoDevicePlanes,
    classify,
    exclusive_time,
    read_device_time,
    read_program,
)
from jepa_jax.profiling.sections import Timeline
from jepa_jax.profiling.trace import PhaseRecorder, TraceWindow

HLO = """HloModule jit_train_step, is_scheduled=true

%fused_computation.7 (p: f32[4]) -> f32[4] {
  %mul.1 = f32[4]{0} multiply(%p, %p), metadata={op_name="jit(train_step)/transpose(jvp(encoder))/mul"}
  ROOT %add.1 = f32[4]{0} add(%mul.1, %p), metadata={op_name="jit(train_step)/transpose(jvp(encoder))/add" id=3}
}

ENTRY %main.9 (a: f32[4]) -> f32[4] {
  %dot.1 = f32[4]{0} dot(%a, %a), metadata={op_name="jit(train_step)/jvp(encoder)/dot_general" stack_frame_id=2}
  %loop_fusion.7 = f32[4]{0} fusion(%dot.1), kind=kLoop, calls=%fused_computation.7
  %while.3 = f32[4]{0} while(%a), body=%b, metadata={op_name="jit(train_step)/jvp(augment)/while"}
  %update.2 = f32[4]{0} add(%a, %a), metadata={op_name="jit(train_step)/optimizer/add"}
  %copy.5 = f32[4]{0} copy(%a)
  ROOT %ema.1 = f32[4]{0} add(%a, %a), metadata={op_name="jit(train_step)/ema/add"}
}
"""


@pytest.mark.parametrize(
    "op_name, expected",
    [
        ("jit(train_step)/jvp(encoder)/cond/branch_0_fun/dot_general", ("forward", "encoder")),
        ("jit(train_step)/transpose(jvp(encoder))/cond/branch_0_fun/transpose(jvp())/mul", ("backward", "encoder")),
        ("jit(train_step)/while/body/transpose(jvp(loss))/vmap()/dot_general", ("backward", "loss")),
        ("jit(train_step)/jvp(augment)/jit(_uniform)/add", ("augment", "augment")),
        ("jit(train_step)/optimizer/mul;jit(train_step)/jvp(encoder)/mul", ("optimizer", "optimizer")),
        ("jit(train_step)/ema/add", ("ema", "ema")),
        ("jit(train_step)/jvp(target)/encoder/dot_general", ("forward", "target")),
        ("jit(train_step)/transpose(jvp(vmap(predictor)))/checkpoint/remat/tanh", ("backward", "predictor")),
        ("jit(train_step)/jvp(teacher)/encoder/dot_general", ("forward", "teacher")),  # of a user's method
        ("jit(train_step)/transpose(jvp(vmap(my head)))/bhd,bkd->bhk/dot_general", ("backward", "my head")),
        ("jit(train_step)/while/body/closed_call/teacher/jit(relu)/max", ("forward", "teacher")),
        ("jit(train_step)/jvp(bh,hx->bx)/dot_general", ("forward", "")),
        ("jit(train_step)/jvp(jit(relu))/max", ("forward", "")),
        ("jit(train_step)/jvp()/transpose", ("forward", "")),
        ("jit(train_step)/jit(_threefry_fold_in)/slice", ("other", "")),
        ("", ("other", "")),
    ],
)  # fmt: skip
def test_names_say_phase_and_scope(op_name, expected):
    assert classify(op_name) == expected


def test_a_fusion_without_a_name_takes_that_of_what_it_holds():
    _, names, _ = read_program(HLO, "gpu")
    assert classify(names["loop_fusion.7"]) == ("backward", "encoder")
    assert names["copy.5"] == "" and names["dot.1"].endswith("dot_general")


def test_a_loop_is_charged_with_its_own_time_alone():
    events = [("while", 0.0, 10.0), ("a", 1.0, 4.0), ("inner", 2.0, 3.0), ("b", 5.0, 9.0), ("next", 12.0, 13.0)]
    assert exclusive_time([events]) == {"while": 3.0, "a": 2.0, "inner": 1.0, "b": 4.0, "next": 1.0}


def test_operations_at_the_same_time_share_it():
    assert exclusive_time([[("a", 0.0, 4.0)], [("b", 2.0, 6.0)]]) == {"a": 3.0, "b": 3.0}


def plane(name, lines):
    """Text of a plane: lines {name: [(event, start us, length us, stats)]}."""
    events, stats = {}, {"hlo_op": 1, "hlo_module": 2}
    body = ""
    for line, entries in lines.items():
        rows = ""
        for event, start, length, values in entries:
            number = events.setdefault(event, len(events) + 1)
            marks = "".join(f'stats {{ metadata_id: {stats[k]} str_value: "{v}" }} ' for k, v in values.items())
            rows += f"events {{ metadata_id: {number} offset_ps: {start}000000 duration_ps: {length}000000 {marks}}} "
        body += f'lines {{ name: "{line}" {rows}}} '
    for event, number in events.items():
        body += f'event_metadata {{ key: {number} value {{ id: {number} name: "{event}" }} }} '
    for stat, number in stats.items():
        body += f'stat_metadata {{ key: {number} value {{ id: {number} name: "{stat}" }} }} '
    return f'planes {{ name: "{name}" {body}}} '


def of(op, module="jit_train_step"):
    return {"hlo_op": op, "hlo_module": module}


def test_gpus_several_devices_command_buffers_and_other_programs():
    kernels = {
        "Stream #1(Compute)": [
            ("gemm", 0, 40, of("dot.1")),
            ("loop_fusion_7", 40, 40, {}),  # inside a command buffer: no instruction, but the kernel's name
            ("eval_kernel", 80, 500, of("fusion.1", "jit_features")),  # another program
            ("update", 600, 10, of("update.2")),
        ],
        "Stream #2(MemcpyH2D)": [("MemcpyH2D", 20, 60, {})],  # the next batch, beside the kernels
        "Stream #3(MemcpyD2H)": [("MemcpyD2H", 610, 10, {})],  # metrics, after them
        "XLA Ops": [("dot.1", 0, 40, of("dot.1"))],  # says the same again
        "Steps": [("0", 0, 700, {})],
    }
    text = plane("/device:GPU:0", kernels) + plane("/device:GPU:1", kernels)
    text += plane("/host:CPU", {"python": [("PjitFunction", 0, 900, {})]})
    result = read_device_time(jax.profiler.ProfileData.from_text_proto(text), HLO, steps=1, platform="gpu")
    assert result is not None
    assert result.busy_seconds == pytest.approx(90e-6)
    shares = {"forward": 4 / 9, "backward": 4 / 9, "optimizer": 1 / 9, "other": 0.0, "augment": 0.0, "ema": 0.0}
    assert result.phases == pytest.approx(shares)
    assert result.attributed == pytest.approx(1.0)
    assert result.copy_seconds == pytest.approx(70e-6)


def read(lines, **options):
    text = plane("/device:GPU:0", lines)
    return read_device_time(jax.profiler.ProfileData.from_text_proto(text), HLO, steps=1, platform="gpu", **options)


def test_a_copy_of_the_step_counts_while_no_kernel_runs():
    lines = {
        "Stream #1": [("gemm", 0, 80, of("dot.1"))],
        "Stream #2": [("MemcpyD2D", 60, 40, of("copy.5"))],  # 20 us of it beside the kernel
        "Stream #3": [("MemcpyD2D", 150, 10, {})],  # inside a command buffer
    }
    found = read(lines)
    assert found.busy_seconds == pytest.approx(110e-6) and found.copy_seconds == 0
    assert {row["op"]: row["share"] for row in found.ops} == pytest.approx(
        {"dot.1": 80 / 110, "copy.5": 20 / 110, "MemcpyD2D": 10 / 110}
    )


def test_copies_are_cut_where_kernels_cover_them():
    lines = [[("k", 2.0, 4.0), ("k", 8.0, 9.0)], [("k", 3.0, 5.0)]]
    copies = [("c", 0.0, 10.0), ("d", 3.0, 4.5), ("e", 5.0, 6.0)]
    assert exclusive_time(lines, copies) == {"k": 4.0, "c": 5.5, "e": 0.5}  # c and e share a second


def test_a_gpu_without_planes_is_said_and_the_host_is_not_read_in_its_place():
    host = plane("/host:CPU", {"thread": [("x", 0, 10, of("dot.1"))]})
    trace = jax.profiler.ProfileData.from_text_proto(host)
    with pytest.raises(NoDevicePlanes):
        read_device_time(trace, HLO, steps=1, platform="gpu")
    assert read_device_time(trace, HLO, steps=1, platform="cpu") is not None  # there the host computes


def test_the_recorder_says_that_a_gpu_could_not_be_recorded(monkeypatch):
    host = jax.profiler.ProfileData.from_text_proto(plane("/host:CPU", {"thread": [("x", 0, 10, of("dot.1"))]}))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    step = SimpleNamespace(were_alike=lambda steps: True, text=lambda: HLO)
    recorder = PhaseRecorder(1, TraceWindow("", pathlib.Path(), Timeline()), step, time.perf_counter)
    assert not recorder._read(host, 1) and recorder.newest is None
    assert "holds nothing of the gpu" in recorder.notes[0] and "CUPTI" in recorder.notes[0]


def test_kernels_have_the_speed_that_they_reach():
    hlo = """HloModule jit_train_step

ENTRY %main (a: bf16[256,512], b: bf16[512,128]) -> bf16[256,128] {
  %a = bf16[256,512]{1,0} parameter(0)
  %b = bf16[512,128]{1,0} parameter(1)
  ROOT %dot.1 = bf16[256,128]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""
    text = plane("/device:GPU:0", {"Stream #1": [("gemm", 0, 20, of("dot.1")), ("gemm", 30, 20, of("dot.1"))]})
    found = read_device_time(jax.profiler.ProfileData.from_text_proto(text), hlo, steps=1, platform="gpu")
    (row,) = found.ops
    assert row["calls"] == 2  # 40 us together
    assert row["gflop_per_second"] == pytest.approx(2 * 2 * 256 * 512 * 128 / 40e-6 / 1e9)
    assert row["gb_per_second"] == pytest.approx(2 * 2 * (256 * 512 + 512 * 128 + 256 * 128) / 40e-6 / 1e9)


def test_a_trace_without_the_program_is_no_result():
    text = plane("/host:CPU", {"thread": [("x", 0, 10, of("dot.1", "jit_other"))]})
    assert read_device_time(jax.profiler.ProfileData.from_text_proto(text), HLO, steps=1) is None
