"""Training's use of plans: a warning before a step that will not fit is compiled, and advice when memory ran out.

Both are help, never a hindrance: whatever goes wrong while planning, training goes on.
"""

import os
import pathlib
from collections.abc import Callable
from typing import Any

import jax

from jepa_jax.base.console import Console
from jepa_jax.data.contract import channels_of, image_spec
from jepa_jax.data.facts import DataFacts
from jepa_jax.planning.gpu_compile import Request, StepCompiler, default_folder
from jepa_jax.planning.planner import NO, Planner, pool_fraction
from jepa_jax.program.build import Program
from jepa_jax.reports.plan_report import gib, pool_lines, ways_out_lines
from jepa_jax.runtime import out_of_memory
from jepa_jax.runtime.hardware import Gpu, gpu_of_device, load_table


def present_gpu() -> Gpu | None:
    """The table's entry for the GPUs of this process; None without one, or with one that the table does not have."""
    device = jax.local_devices()[0]
    if device.platform != "gpu":
        return None
    stats = device.memory_stats() or {}
    return gpu_of_device(device.device_kind, stats.get("bytes_limit"), load_table())


def warn_if_too_large(
    config: Any,
    program: Program,
    console: Console,
    *,
    num_train: int,
    num_classes: int,
    gpu: Gpu | None = None,
    folder: pathlib.Path | None = None,
) -> bool:
    """Warns if the plan of `config` for the present GPU (or `gpu`) says that it does not fit; True if it warned.

    A plan costs one compilation the first time and is kept.
    """
    try:
        gpu = gpu or present_gpu()
        if gpu is None:
            return False
        planner, request = _planner(config, program, gpu, num_train, num_classes, folder, console.line)
        row = planner.row(request)
    except Exception as error:  # a plan that cannot be made is no reason to stop a run that may work
        console.line(f"no plan of the memory ({_first_line(error)}); config.profile.plan=False makes none")
        return False
    if row.verdict == NO:
        console.warn(
            f"{gpu.name}: this step needs about {gib(row.need.total)} of {gib(row.capacity)} "
            f"and will run out of memory; python scripts/plan.py --gpu={gpu.key} with the same --config says what fits"
        )
        return True
    for line in pool_lines(row, pool_fraction(os.environ)):
        console.line(line)
    return False


def is_out_of_memory(error: BaseException) -> bool:
    return out_of_memory.is_out_of_memory(f"{type(error).__name__}: {error}")


def ways_out_message(
    config: Any,
    program: Program,
    console: Console,
    *,
    num_train: int,
    num_classes: int,
    gpu: Gpu | None = None,
    folder: pathlib.Path | None = None,
) -> str:
    """What to tell a user whose run has run out of memory: the need, and changes that were compiled and fit."""
    try:
        gpu = gpu or present_gpu()
    except Exception:  # a device that is out of memory may not even tell its name
        gpu = None
    whose = "the GPU's" if gpu else "this machine's"
    head = f"config.data.batch_size = {config.data.batch_size}: {whose} memory is used up"
    general = "use a smaller batch, config.train.remat=full or more config.train.accum_steps"
    if gpu is None:
        return f"{head}; {general}"
    try:
        console.line("out of memory; looking for what fits (some compilations)")
        planner, request = _planner(config, program, gpu, num_train, num_classes, folder, console.line)
        row = planner.row(request)
        if row.verdict != NO:
            pool = pool_lines(row, pool_fraction(os.environ))
            hints = ["see with nvidia-smi who else uses it", *pool, f"or {general}"]
            return f"{head}, although {gib(row.need.total)} of {gib(row.capacity)} should do: {'; '.join(hints)}"
        largest = planner.largest_batches([(request, row)])[0]
        ways = planner.ways_out(request, row, largest)
    except Exception:  # the advice must not take the place of the error it is about
        return f"{head}; {general}"
    need = f"the step needs about {gib(row.need.total)} of the {gib(row.capacity)} of a {gpu.name}"
    return "\n".join([f"{head}: {need}", *ways_out_lines(ways)])


def _planner(
    config: Any,
    program: Program,
    gpu: Gpu,
    num_train: int,
    num_classes: int,
    folder: pathlib.Path | None,
    say: Callable[[str], None],
) -> tuple[Planner, Request]:
    spec = image_spec(config.data.image_size, channels_of(config.data), labelled=num_classes > 0)
    compiler = StepCompiler(
        DataFacts(num_train, num_classes, spec),
        folder or default_folder(),
        on_compile=lambda what: say(f"planning memory: compiling for {what}"),
    )
    hosts = jax.process_count()
    topology = f"1x{hosts}x{max(1, program.mesh.size // hosts)}"
    return Planner(compiler, load_table()), Request(config, gpu, topology)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]
