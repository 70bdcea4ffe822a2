"""Speed: four small fixed steps, their time by kind of kernel, in the form that the fit of shares reads."""

import collections
from typing import Any

import jax

from jepa_jax.compiled.hlo import parse_hlo
from jepa_jax.compiled.kernels import kernels_by_name, read_kernels
from jepa_jax.device_check.findings import Findings
from jepa_jax.device_check.rates import seconds_of
from jepa_jax.device_check.small_steps import make_step
from jepa_jax.profiling.device_time import traced_ops
from jepa_jax.profiling.trace import ShortTrace

STEPS = 5  # recorded
BATCH = 1024
WIDE_VIT = {"model__width": 384, "model__depth": 6, "model__heads": 6}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "resnet": ("image_jepa", {"model__width": 64}),
    "vit": ("ijepa", WIDE_VIT),
    "vit_masked": ("mae", WIDE_VIT),
    "vit_float32": ("ijepa", WIDE_VIT | {"train__precision": "float32"}),
}


def measure(name: str, *, batch_size: int = BATCH) -> dict[str, Any]:
    """Returns the speed of a step, its kernels as compiled, and the traced seconds of each kind of kernel."""
    method, changes = CONFIGS[name]
    sizes = {"data__batch_size": batch_size, "data__num_train": 2 * batch_size, "eval__batch_size": batch_size}
    sizes["optim__reference_batch"] = batch_size
    small = make_step(method, jax.local_devices()[:1], **{"train__precision": "bfloat16"} | sizes | changes)
    step: Any = small.program.train_step
    batch = jax.device_put(small.batch, jax.local_devices()[0])
    text = step.lower(small.state, batch).compile().as_text()
    state = [small.state]

    def take() -> Any:
        state[0], metrics = step(state[0], batch)
        return metrics

    seconds = seconds_of(take)
    program = parse_hlo(text)
    trace = ShortTrace()
    trace.start()
    for _ in range(STEPS):
        metrics = take()
    jax.block_until_ready(metrics)
    platform = jax.local_devices()[0].platform
    traced, _, _ = traced_ops(trace.stop(), program.name, STEPS, platform)
    return {
        "config": name,
        "batch_size": batch_size,
        "samples_per_sec": batch_size / seconds,
        "seconds_by_kind": seconds_by_kind(traced, program),
        "kernels": [kernel._asdict() for kernel in read_kernels(program)],
    }


def seconds_by_kind(traced: dict[str, float], program: Any) -> dict[str, float]:
    """Returns the traced seconds per step by kind of kernel; "other" are those of no instruction."""
    kinds = {name: kernel.kind for name, kernel in kernels_by_name(program).items()}
    totals: dict[str, float] = collections.defaultdict(float)
    for op, seconds in traced.items():
        totals[kinds.get(op, "other")] += seconds
    return dict(totals)


def run(findings: Findings, minutes: float) -> None:
    """Measures all configs; of speed nothing is demanded, since it is what the card is asked for."""
    measured = [measure(name) for name in CONFIGS]
    for one in measured:
        findings.note(f"{one['config']}: images/s", one["samples_per_sec"])
    findings.figures["measurements"] = measured
