"""Compares plans with measurements: operations with XLA's own count, and on a GPU the peak with the allocator's."""

import dataclasses

import jax
import numpy as np

from jepa_jax.base.errors import UserError
from jepa_jax.compiled.flops import Rules, jaxpr_flops
from jepa_jax.config.groups import Config
from jepa_jax.data.contract import abstract_batch
from jepa_jax.data.facts import DataFacts
from jepa_jax.data.photos.crops import batch_spec
from jepa_jax.planning.planner import Plan
from jepa_jax.planning.step_compiler import program_for
from jepa_jax.planning.step_facts import trace_step
from jepa_jax.program.config import changed_config
from jepa_jax.runtime.hardware import gpu_of_device, load_table
from jepa_jax.runtime.memory import is_out_of_memory

MEASURED_STEPS = 3


@dataclasses.dataclass(frozen=True)
class PlanCheck:
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


def check_flops(config: Config, data: DataFacts) -> PlanCheck:
    """Compares the operations of a step on one CPU device with XLA's analysis; both count a loop body once."""
    config = changed_config(config, {"mesh.data": -1, "mesh.fsdp": 1})
    program = program_for(config, data, jax.devices("cpu")[:1])
    traced = trace_step(program, abstract_batch(batch_spec(config, data.spec), config.data.batch_size))
    counted = jaxpr_flops(traced.jaxpr.jaxpr, Rules(platform="cpu", loops_once=True, elementwise=True))
    xla = traced.lower().cost_analysis()["flops"]
    return PlanCheck("operations per step on CPU, against XLA's count", counted, xla)


def check_peak(plan: Plan, data: DataFacts) -> PlanCheck:
    """Runs a few steps on the GPUs of this machine and compares their allocator's peak with the plan's."""
    config, wanted = plan.request.config, plan.request.devices
    devices = jax.local_devices()
    here = gpu_of_device(devices[0].device_kind, None, load_table())
    if here is None or here.name != plan.request.gpu.name or len(devices) < wanted:
        raise UserError(
            f"--check: the plan is for {wanted} x {plan.request.gpu.name}, this machine has "
            f"{len(devices)} x {devices[0].device_kind}; check a plan on the GPUs it is for"
        )
    program = program_for(config, data, devices[:wanted])
    sample, batch = (
        {name: np.zeros(leaf.shape, leaf.dtype) for name, leaf in abstract_batch(spec, config.data.batch_size).items()}
        for spec in (data.spec, batch_spec(config, data.spec))
    )
    try:
        state = program.factory.create(config.train.seed, sample)
        for _ in range(MEASURED_STEPS):
            state, metrics = program.train_step(state, batch)
        jax.block_until_ready(metrics)
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(f"--check: memory ran out; the plan says: {plan.estimate.verdict}") from error
    peak = (devices[0].memory_stats() or {})["peak_bytes_in_use"]
    return PlanCheck("peak bytes of a device, against its allocator", plan.estimate.facts.peak_bytes, peak)
