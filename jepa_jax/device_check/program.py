"""Program: what XLA made of a training step for this device, and for all of them together."""

import re
from typing import Any

import jax

from jepa_jax.compiled.hlo import COLLECTIVES, parse_hlo
from jepa_jax.compiled.kernels import ATTENTION, read_kernels
from jepa_jax.compiled.moves import transposed_share
from jepa_jax.device_check.findings import Findings
from jepa_jax.device_check.small_steps import make_step
from jepa_jax.profiling.compilations import CompilationCounter

TRANSPOSED_MOST = 0.03  # of the bytes moved
TOKENS = 81  # of 9 x 9 patches of 4 pixels: a number that no other axis has
STEPS = 3
LOSS_ERROR = 5e-3  # relative, of one device and all in float32 (TF32 products)
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


def losses(devices: list[Any], batch_size: int) -> tuple[list[float], str]:
    """Returns the loss of a few steps on some devices, and the text of the program."""
    sizes = dict(data__batch_size=batch_size, data__num_train=2 * batch_size, eval__batch_size=batch_size)
    small = make_step("ijepa", devices, mesh__data=len(devices), **sizes)
    step: Any = small.program.train_step
    text = step.lower(small.state, small.batch).compile().as_text()
    state, found = small.state, []
    for _ in range(STEPS):
        state, metrics = step(state, small.batch)
        found.append(float(metrics["loss"]))
    return found, text


def overlapped(text: str) -> tuple[int, int]:
    """Returns how many exchanges have other kernels between their start and their end, and how many there are."""
    program = parse_hlo(text)
    total = apart = 0
    for computation in program.computations.values():
        names = list(computation)
        for place, name in enumerate(names):
            opcode = computation[name].opcode
            total += opcode.removesuffix("-start") in COLLECTIVES
            if not opcode.endswith("-start") or opcode.removesuffix("-start") not in COLLECTIVES:
                continue
            end = next((i for i in range(place, len(names)) if name in computation[names[i]].operands), place)
            between = (computation[other] for other in names[place + 1 : end])
            apart += any(program.kernel_bytes(one, computation) for one in between)
    return apart, total


def run_devices(findings: Findings, minutes: float) -> None:
    """Compares one device with all of them."""
    devices = jax.local_devices()
    batch_size = 32 * len(devices)
    alone, _ = losses(devices[:1], batch_size)
    together, text = losses(devices, batch_size)
    off = max(abs(a - b) / max(abs(a), 1e-2) for a, b in zip(alone, together, strict=True))
    findings.at_most(f"losses of 1 and {len(devices)} devices: relative difference", off, LOSS_ERROR)
    apart, total = overlapped(text)
    findings.at_least(f"exchanges that overlap with computation, of {total}", apart, min(1, total))
