"""Program: what XLA made of a training step for this device."""

import re
from typing import Any

import jax

from jepa_jax.compiled.hlo import parse_hlo
from jepa_jax.compiled.kernels import ATTENTION, read_kernels
from jepa_jax.compiled.moves import transposed_share
from jepa_jax.device_check.findings import Findings
from jepa_jax.device_check.small_steps import make_step
from jepa_jax.profiling.compilations import CompilationCounter

TRANSPOSED_MOST = 0.03  # of the bytes moved
TOKENS = 81  # of 9 x 9 patches of 4 pixels: a number that no other axis has
STEPS = 3
FUSED = re.compile(r"fmha|attention_forward")  # cuDNN's call, or the kernel of Triton


def check_text(text: str, platform: str, tokens: int, findings: Findings) -> None:
    """Reads a compiled step; layouts and fused kernels matter on GPUs alone."""
    program = parse_hlo(text)
    calls = program.host_calls()
    findings.true("no call to the host", not calls, ", ".join(calls[:3]))
    if platform == "cpu":
        return
    fused = any(kernel.kind == ATTENTION for kernel in read_kernels(program)) or bool(FUSED.search(text))
    findings.true("fused attention", fused)
    scores = re.findall(rf"\w+\[[\d,]*\b{tokens},{tokens}\]", text)
    findings.true(f"no array of {tokens} x {tokens} scores", not scores, ", ".join(sorted(set(scores))[:3]))
    findings.at_most("share of bytes moved that only changes layouts", transposed_share(program), TRANSPOSED_MOST)


def run(findings: Findings, minutes: float) -> None:
    """Compiles and takes steps of a masked method in the precision that GPUs compute in."""
    device = jax.local_devices()[0]
    precision = "float32" if device.platform == "cpu" else "bfloat16"
    small = make_step("ijepa", [device], train__precision=precision, data__image_size=36)
    step: Any = small.program.train_step
    check_text(step.lower(small.state, small.batch).compile().as_text(), device.platform, TOKENS, findings)
    state, _ = step(small.state, small.batch)
    with CompilationCounter() as counter:
        for _ in range(STEPS):
            state, metrics = step(state, small.batch)
        jax.block_until_ready(metrics)
    findings.at_most("compilations after the first step", counter.count, 0)
