"""Compares a plan with something measured: operations with XLA's own count, on a GPU the peak with the real one."""

import copy
import dataclasses
from typing import Any

import jax
import numpy as np

from jepa_jax.base.errors import UserError
from jepa_jax.data.contract import abstract_batch
from jepa_jax.data.facts import DataFacts
from jepa_jax.planning.gpu_compile import program_for, trace_step
from jepa_jax.planning.planner import Plan
from jepa_jax.program.flops import Rules, jaxpr_flops
from jepa_jax.runtime import out_of_memory
from jepa_jax.runtime.hardware import gpu_of_device, load_table

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


def check_flops(config: Any, data: DataFacts) -> Check:
    """Operations of a step on this machine's CPU against XLA's analysis; both count a loop body once."""
    config = copy.deepcopy(config)
    config.mesh.data, config.mesh.fsdp = -1, 1  # one device, however many the plan is for
    program = program_for(config, data, jax.devices("cpu")[:1])
    traced = trace_step(program, abstract_batch(data.spec, config.data.batch_size))
    counted = jaxpr_flops(traced.jaxpr.jaxpr, Rules(platform="cpu", loops_once=True, elementwise=True))
    return Check("operations of a step on CPU, against XLA's count", counted, traced.lower().cost_analysis()["flops"])


def check_peak(plan: Plan, data: DataFacts) -> Check:
    """Runs a few steps on the GPUs that are here; their allocator's peak against the plan's."""
    config, wanted = plan.request.config, plan.request.devices
    devices = jax.local_devices()
    here = gpu_of_device(devices[0].device_kind, None, load_table())
    if here is None or here.name != plan.request.gpu.name or len(devices) < wanted:
        raise UserError(
            f"--check: the plan is for {wanted} x {plan.request.gpu.name}, here are "
            f"{len(devices)} x {devices[0].device_kind}; check a plan on what it is for"
        )
    program = program_for(config, data, devices[:wanted])
    batch = {
        name: np.zeros(leaf.shape, leaf.dtype)
        for name, leaf in abstract_batch(data.spec, config.data.batch_size).items()
    }
    try:
        state = program.factory.create(config.train.seed, batch["image"])
        for _ in range(MEASURED_STEPS):
            state, metrics = program.train_step(state, batch)
        jax.block_until_ready(metrics)
    except jax.errors.JaxRuntimeError as error:
        if not out_of_memory.is_out_of_memory(str(error)):
            raise
        raise UserError(f"--check: memory ran out; the plan says: {plan.row.verdict}") from error
    peak = (devices[0].memory_stats() or {})["peak_bytes_in_use"]
    return Check("peak bytes of a device, against its allocator", plan.row.facts.peak_bytes, peak)
