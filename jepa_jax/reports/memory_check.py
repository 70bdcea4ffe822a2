"""Warns before a training step that does not fit the GPU, and says what would fit when memory has run out.

`check_memory` and `explain_out_of_memory` are hooks of `jepa_jax.train`. They never raise: training goes on when a plan
cannot be made.
"""

import os

import jax

from jepa_jax.base.console import Console
from jepa_jax.base.text import gib
from jepa_jax.config.groups import Config
from jepa_jax.data.facts import DataFacts
from jepa_jax.planning.planner import Planner
from jepa_jax.planning.step_compiler import Request, StepCompiler, default_folder
from jepa_jax.program.build import Program
from jepa_jax.reports.plan_text import pool_lines, table_lines, ways_out_table
from jepa_jax.runtime.allocator import pool_fraction
from jepa_jax.runtime.hardware import Gpu, gpu_of_device, load_table
from jepa_jax.runtime.peers import is_first

GENERAL_ADVICE = "use a smaller batch, config.train.remat=full or more config.train.accum_steps"


def check_memory(config: Config, program: Program, data: DataFacts, console: Console) -> None:
    """Warns if the step does not fit the GPU of this process; costs one compilation the first time.

    Does nothing without a GPU, with config.profile.plan=False, and in all but the first process.
    """
    try:
        gpu = present_gpu()
        if gpu is None or not config.profile.plan or not is_first():
            return
        estimate = _planner(data, console).estimate(_request(config, program, gpu))
    except Exception as error:  # the run may work without a plan
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        console.line(f"no plan of the memory ({reason}); config.profile.plan=False skips it")
        return
    if not estimate.fits:
        console.warn(
            f"{gpu.name}: this step needs about {gib(estimate.need.total)} of {gib(estimate.capacity)} "
            f"and will run out of memory; jepa-jax plan --gpu={gpu.key} with the same --config says what fits"
        )
    else:
        for line in pool_lines(estimate, pool_fraction(os.environ)):
            console.line(line)


def explain_out_of_memory(config: Config, program: Program, data: DataFacts, console: Console) -> str:
    """Returns what to tell a user whose run ran out of memory: the need, and compiled changes that fit."""
    head = f"config.data.batch_size = {config.data.batch_size}: the memory is used up"
    try:
        gpu = present_gpu()
        if gpu is None:
            return f"{head}; {GENERAL_ADVICE}"
        console.line("out of memory; looking for what fits (some compilations)")
        planner = _planner(data, console)
        estimate = planner.estimate(_request(config, program, gpu))
        need = f"{gib(estimate.need.total)} of the {gib(estimate.capacity)} of a {gpu.name}"
        if estimate.fits:
            pool = pool_lines(estimate, pool_fraction(os.environ))
            hints = ["nvidia-smi shows who else uses it", *pool, f"or {GENERAL_ADVICE}"]
            return f"{head}, although {need} should be enough: {'; '.join(hints)}"
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


def _planner(data: DataFacts, console: Console) -> Planner:
    compiler = StepCompiler(
        data, default_folder(), on_compile=lambda what: console.line(f"planning memory: compiling for {what}")
    )
    return Planner(compiler, load_table())


def _request(config: Config, program: Program, gpu: Gpu) -> Request:
    hosts = jax.process_count()
    return Request(config, gpu, f"1x{hosts}x{max(1, program.mesh.size // hosts)}")
