"""Says what would fit the GPU when the memory of a training step has run out."""

import os

import jax

from jepa_jax.base.console import Console
from jepa_jax.base.text import gib
from jepa_jax.config.groups import Config
from jepa_jax.data.facts import DataFacts
from jepa_jax.planning.planner import Planner
from jepa_jax.planning.step_compiler import Request, StepCompiler, default_folder
from jepa_jax.program.build import Program
from jepa_jax.reports.plan_text import table_lines, ways_out_table
from jepa_jax.runtime.allocator import POOL_VARIABLE, pool_fraction
from jepa_jax.runtime.hardware import Gpu, gpu_of_device, load_table

GENERAL_ADVICE = "use a smaller batch, config.train.remat=full or more config.train.accum_steps"


def explain_out_of_memory(config: Config, program: Program, data: DataFacts, console: Console) -> str:
    """Returns what to tell a user whose run ran out of memory: the need, and compiled changes that fit."""
    head = f"config.data.batch_size = {config.data.batch_size}: the memory is used up"
    try:
        gpu = present_gpu()
        if gpu is None:
            return f"{head}; {GENERAL_ADVICE}"
        console.line("out of memory; looking for what fits (some compilations)")
        compiler = StepCompiler(data, default_folder(), on_compile=lambda what: console.line(f"compiling for {what}"))
        planner, hosts = Planner(compiler, load_table()), jax.process_count()
        topology = f"1x{hosts}x{max(1, program.mesh.size // hosts)}"
        estimate = planner.estimate(Request(config, gpu, topology, memory_fraction=pool_fraction(os.environ)))
        share = f"{100 * pool_fraction(os.environ):.0f} % ({POOL_VARIABLE})"
        need = f"{gib(estimate.need.total)} of the {gib(estimate.capacity)} that JAX takes of a {gpu.name}, {share},"
        if estimate.fits:
            return f"{head}, although {need} should be enough: nvidia-smi shows who else uses it; or {GENERAL_ADVICE}"
        ways = planner.ways_out(estimate, *planner.largest_batches([estimate]))
        return "\n".join([f"{head}: the step needs about {need}", *table_lines(ways_out_table(estimate, ways))])
    except Exception:  # the advice must not hide the error it is about
        return f"{head}; {GENERAL_ADVICE}"


def present_gpu() -> Gpu | None:
    """Returns the table's entry for the GPU of this process; None without a GPU or for one that is not in the table."""
    device = jax.local_devices()[0]
    if device.platform != "gpu":
        return None
    stats = device.memory_stats() or {}
    return gpu_of_device(device.device_kind, stats.get("bytes_limit"), load_table())
