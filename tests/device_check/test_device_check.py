"""The check of a device finds what is wrong with it: injected faults, and fakes of GPUs for what only they have."""

import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jepa_jax.base.errors import EXIT_DIVERGED, EXIT_OK, EXIT_USER_ERROR
from jepa_jax.device_check import check, commands, numerics, program, rates
from jepa_jax.device_check.findings import Findings
from jepa_jax.runtime.hardware import load_table
from tests.runtime.test_gpus import FakeNvml

CPU = jax.local_devices()[0]
OPERATIONS = {operation.name: operation for operation in numerics.operations(all_pairs=False)}


def failed(check, *arguments):
    findings = Findings()
    check(*arguments, findings)
    return [finding.what for finding in findings.failed]


def test_a_kernel_that_is_wrong_or_does_not_compile_is_found_and_a_right_one_passes():
    dense = OPERATIONS["dense layer"]
    assert not failed(numerics.check_operation, dense, "float32", CPU)
    assert not failed(numerics.check_operation, dense, "bfloat16", CPU)
    wrong = dense._replace(function=lambda x, kernel, bias: dense.function(x, kernel, bias) * 1.02)

    @jax.custom_vjp
    def right_forward(x, kernel, bias):
        return x @ kernel + bias

    right_forward.defvjp(
        lambda x, kernel, bias: (right_forward(x, kernel, bias), (x, kernel)),
        lambda kept, dy: (dy @ kept[1].T, jnp.zeros_like(kept[1]), dy.sum((0, 1))),
    )
    for broken in (wrong, dense._replace(function=right_forward), dense._replace(function=lambda *_: 1 / 0)):
        assert failed(numerics.check_operation, broken, "float32", CPU)


def test_every_width_and_length_is_tried():
    names = [operation.name for operation in numerics.operations(all_pairs=True)]
    pairs = [f"attention, {n} tokens, width {d}" for n in (64, 65, 78, 196, 257) for d in (32, 48, 64, 80, 128)]
    assert set(pairs) < set(names) and len(OPERATIONS) < len(names)


def text_of(function):
    return jax.jit(function).lower(jnp.ones((256, 512))).compile().as_text()


def test_a_layout_that_is_changed_in_between_is_found():
    plain = text_of(lambda x: jnp.tanh(x))
    turned = text_of(lambda x: x.T)
    share = "share of bytes moved that only changes layouts"
    assert share not in failed(program.check_text, plain, "gpu", 81)
    assert share in failed(program.check_text, turned, "gpu", 81)


def test_attention_that_writes_its_scores_is_found():
    found = failed(program.check_text, text_of(lambda x: x[:81, :64] @ x[:81, :64].T), "gpu", 81)
    assert {"no array of 81 x 81 scores", "fused attention"} <= set(found)


def test_calls_to_the_host_are_found():
    text = text_of(lambda x: jax.pure_callback(np.tanh, jax.ShapeDtypeStruct(x.shape, x.dtype), x))
    assert failed(program.check_text, text, "cpu", 81) == ["no call to the host"]


@pytest.mark.parametrize(
    "name, code, errors, holds",
    [
        ("fits", EXIT_OK, "", True),
        ("fits", EXIT_USER_ERROR, "error: config.data.batch_size = 8: memory is used up", False),
        ("beyond", EXIT_USER_ERROR, "error: config.data.batch_size = 8: memory is used up", True),
        ("beyond", EXIT_OK, "", False),
        ("beyond", 134, "terminate called", False),
        ("beyond", EXIT_DIVERGED, "", False),
    ],
)
def test_how_a_training_at_the_limit_of_memory_may_end(name, code, errors, holds):
    ended = subprocess.CompletedProcess([], code, "", errors)
    assert bool(failed(commands.check_memory, name, 8, ended)) != holds


TRAINING = """
import sys, time
with open(sys.argv[1], "w", buffering=1) as metrics:
    for step in range(1_000_000):
        for name in ("loss", "rate", "speed"):
            metrics.write('{"step": %d, "%s": 1.0}\\n' % (step, name))
        time.sleep(0.001)
"""


def test_a_training_is_killed_after_a_step_however_many_rows_each_step_has(tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    assert commands.kill_at([sys.executable, "-c", TRAINING, str(metrics)], metrics, 12)
    assert 12 <= commands.newest_step(metrics) < 999_999
    assert not commands.kill_at([sys.executable, "-c", ""], tmp_path / "none.jsonl", 12)


EXCHANGES = """HloModule jit_step

ENTRY %main (a: f32[64,64]) -> f32[64,64] {
  %a = f32[64,64] parameter(0)
  %s = f32[64,64] all-reduce-start(%a), replica_groups={{0,1}}
  MIDDLE
  %d = f32[64,64] all-reduce-done(%s)
  ROOT %r = f32[64,64] add(%d, %d)
}
"""


def test_an_exchange_overlaps_if_a_kernel_runs_before_its_end():
    between = EXCHANGES.replace("MIDDLE", "%m = f32[64,64] multiply(%a, %a)")
    assert program.overlapped(between) == (1, 1)
    assert program.overlapped(EXCHANGES.replace("MIDDLE", "")) == (0, 1)


def test_a_gpu_is_identified_by_jax_and_nvml():
    class Nvml(FakeNvml):
        nvmlSystemGetDriverVersion = staticmethod(lambda: "580.65")
        nvmlSystemGetCudaDriverVersion = staticmethod(lambda: 13020)
        nvmlDeviceGetCurrentClocksThrottleReasons = staticmethod(lambda handle: 0x40)

    device = types.SimpleNamespace(
        platform="gpu", device_kind="NVIDIA GeForce RTX 4090", compute_capability="8.9", local_hardware_id=1,
        memory_stats=lambda: {"bytes_limit": 19 * 2**30},
    )  # fmt: skip
    facts = rates.identify([device], Nvml())
    assert facts["driver"] == "580.65" and facts["cuda"] == "13.2" and facts["pool_bytes"] == 19 * 2**30
    assert facts["throttled"] == 1.0 and facts["memory_total_gb"] == 24


def test_rates_far_from_those_of_the_table_are_found():
    gpu = load_table()["rtx4090"]
    usual = {"bf16_tflops": 0.9 * gpu.bf16_tflops, "copy_gb_per_second": 0.9 * gpu.bandwidth_gb_per_second}
    assert not failed(rates.check_rates, usual, gpu)
    assert len(failed(rates.check_rates, usual | {"bf16_tflops": 0.1 * gpu.bf16_tflops}, gpu)) == 1
    assert not failed(rates.check_rates, {"bf16_tflops": 0.1}, None)  # a card that the table does not know


def test_parts_that_make_no_sense_are_left_out_and_those_without_time_have_failed():
    lines = []
    card = check.check_device(["memory", "devices"], 5.0, 0, lines.append)
    assert card["passed"] and [part["status"] for part in card["parts"].values()] == ["left out"] * 2
    assert "left out" in lines[0] and "needs 1 GPU" in lines[0]
    assert not check.check_device(["numerics"], 0.0, 0, lines.append)["passed"]


@pytest.mark.slow
def test_a_part_that_dies_has_failed(tmp_path, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--no_such_flag")
    part = check.run_process("program", 1.0, tmp_path)
    assert part["status"] == "failed" and "no_such_flag" in part["why"]
