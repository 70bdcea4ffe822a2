"""All GPUs: the losses of one device and of all, and whether exchanges overlap with computation."""

from typing import Any

import jax

from jepa_jax.compiled.hlo import COLLECTIVES, parse_hlo
from jepa_jax.device_check.findings import Findings
from jepa_jax.device_check.small_steps import make_step

STEPS = 3
LOSS_ERROR = 5e-3  # relative, in float32 (TF32 products)


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


def run(findings: Findings, minutes: float) -> None:
    """Compares one device with all of them."""
    devices = jax.local_devices()
    batch_size = 32 * len(devices)
    alone, _ = losses(devices[:1], batch_size)
    together, text = losses(devices, batch_size)
    off = max(abs(a - b) / max(abs(a), 1e-2) for a, b in zip(alone, together, strict=True))
    findings.at_most(f"losses of 1 and {len(devices)} devices: relative difference", off, LOSS_ERROR)
    apart, total = overlapped(text)
    findings.at_least(f"exchanges that overlap with computation, of {total}", apart, min(1, total))
