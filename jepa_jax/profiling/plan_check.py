"""Compares a plan with something measured: operations with XLA's own count, on a GPU the peak with the real one."""

import dataclasses
from typing import Any

import jax
import numpy as np

from jepa_jax.profiling.flops import Rules, jaxpr_flops
from jepa_jax.profiling.gpu_compile import DataSize, abstract_batch, program_for, trace_step

MEASURED_STEPS = 3


@dataclasses.dataclass(frozen=True)
class Check:
    """A predicted figure beside the one it is compared with."""

    what: str
    predicted: float
    measured: float

    @property
    def error_percent(self) -> float:
        return 100 * (self.predicted / self.measured - 1)

    def line(self) -> str:
        return (
            f"check: {self.what}: predicted {self.predicted:,.4g}, {self.measured:,.4g} ({self.error_percent:+.2f} %)"
        )


def check_flops(config: Any, data: DataSize) -> Check:
    """Operations of a step on this machine's CPU against XLA's analysis; both count a loop body once."""
    program = program_for(config, data, jax.devices("cpu")[:1])
    traced = trace_step(program, abstract_batch(config))
    counted = jaxpr_flops(traced.jaxpr.jaxpr, Rules(platform="cpu", loops_once=True, elementwise=True))
    return Check("operations of a step on CPU, against XLA's count", counted, traced.lower().cost_analysis()["flops"])


def check_peak(config: Any, data: DataSize, predicted_bytes: int) -> Check:
    """Runs a few steps on the GPUs that are here; their allocator's peak against the predicted one."""
    program = program_for(config, data, jax.devices())
    batch = {name: np.zeros(leaf.shape, leaf.dtype) for name, leaf in abstract_batch(config).items()}
    state = program.factory.create(config.train.seed, batch["image"])
    for _ in range(MEASURED_STEPS):
        state, metrics = program.train_step(state, batch)
    jax.block_until_ready(metrics)
    peak = (jax.local_devices()[0].memory_stats() or {})["peak_bytes_in_use"]
    return Check("peak bytes of a device, against its allocator", predicted_bytes, peak)
