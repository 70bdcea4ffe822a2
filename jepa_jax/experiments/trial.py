"""Measures one combination of settings once, in a process of its own, so that no failure there ends its parent.

    python -m jepa_jax.experiments.trial REQUEST.json RESULT.json

`run_trial` starts this process, which reads the request, measures it (`measurement.py`) and writes the result. What
the process can explain by itself (a setting that is refused, memory that ran out, an exception) is a result too; what
it does not survive is explained by its parent.
"""

import contextlib
import dataclasses
import importlib.util
import json
import os
import pathlib
import re
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from jepa_jax.base import processes
from jepa_jax.base.errors import EXIT_OK, UserError
from jepa_jax.base.files import write_json
from jepa_jax.base.text import shortened
from jepa_jax.experiments import rows
from jepa_jax.experiments.engine import explain_exit
from jepa_jax.experiments.rows import TrialFigures, TrialResult
from jepa_jax.experiments.settings import TrialRequest
from jepa_jax.runtime.allocator import pool_fraction, pool_variables
from jepa_jax.runtime.gpus import only_gpu
from jepa_jax.runtime.memory import is_out_of_memory
from jepa_jax.runtime.platforms import import_jax

TRIAL_COMMAND: tuple[str, ...] = (sys.executable, "-m", "jepa_jax.experiments.trial")  # + request, result
REQUEST, RESULT = "request.json", "result.json"
CACHE = "compiled"  # programs of all trials of a folder: on CPUs a repeat is not compiled again
CACHED_FROM_SECONDS = 0.2  # of compilation
STOP_SECONDS = 1.0  # for a trial to end when it is asked to; it has nothing to save

MeasureRequest = Callable[[TrialRequest], TrialFigures]


def run_trial(
    folder: pathlib.Path,
    request: TrialRequest,
    *,
    time_limit: float,
    limit_flag: str = "",
    on_tick: Callable[[], None] = lambda: None,
) -> TrialResult:
    """Measures one repeat in a new process, with request, result and log in `folder`, which is emptied before.

    The trials of an experiment share the parent of their folders, in which they keep their compiled programs.
    """
    try:
        if not request.make:
            request.configuration()
        environment = child_environment(request, folder.parent)
    except UserError as error:
        return TrialResult(rows.REFUSED, str(error))
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_json(folder / REQUEST, request.to_dict())
    command = [*TRIAL_COMMAND, str(folder / REQUEST), str(folder / RESULT)]
    options: Any = {"environment": environment, "timeout": time_limit, "grace": STOP_SECONDS, "on_tick": on_tick}
    began = time.monotonic()
    ended = processes.run(command, folder, **options)
    result = finished_result(folder, request)
    # A trial that was done and hung while it closed was measured all the same.
    if result is None or (ended.timed_out and result.status != rows.OK):
        result = result_of_end(ended, time_limit, limit_flag)
    return dataclasses.replace(result, trial_seconds=round(time.monotonic() - began, 3))


def result_of_end(ended: processes.Ended, time_limit: float, limit_flag: str = "") -> TrialResult:
    """Returns the result of a trial whose process left none."""
    status, reason = explain_exit(ended, time_limit, limit_flag)
    if status == rows.FINISHED:
        reason = f"ended without a result; its last message: {ended.message}"
    if status == rows.TIMED_OUT and not limit_flag:  # the limit is what the budget of a search allows
        needed = re.findall(rows.NEEDED.format(r"(\d+)"), ended.log)
        about = f"about {max(int(needed[-1]), round(1.1 * time_limit))}" if needed else f"more than {time_limit:.0f}"
        reason = f"too slow to judge in this budget: one trial needs {about} s"
    return TrialResult(status if status in (rows.OUT_OF_MEMORY, rows.TIMED_OUT) else rows.CRASHED, reason)


def device_options(hardware: Mapping[str, Any], memory_fraction: float | None) -> dict[str, Any]:
    """Returns the fields of a request that depend on whether `hardware` has a GPU.

    The fraction of its memory is by default what the environment says, which training will use.
    """
    if hardware["gpu_name"] is None:
        return {"memory_fraction": memory_fraction, "compile_anew": False}
    return {"memory_fraction": memory_fraction or pool_fraction(os.environ), "compile_anew": True}


def child_environment(request: TrialRequest, folder: pathlib.Path) -> dict[str, str]:
    """Returns the variables that a trial's process has in addition to those of this one."""
    variables = {
        "JAX_COMPILATION_CACHE_DIR": str((folder / CACHE).resolve()),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": str(CACHED_FROM_SECONDS),
        # Whole programs alone: kernels tuned for other trials would make the time to compile depend on their order.
        "JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES": "none",
        "PYTHONPATH": processes.python_path(),
    }
    if request.make:
        variables["PYTHONPATH"] = os.pathsep.join([module_folder(request.make), variables["PYTHONPATH"]])
    if request.compile_anew:
        variables["JAX_ENABLE_COMPILATION_CACHE"] = "false"
    return variables | pool_variables(request.memory_fraction, os.environ) | only_gpu(request.gpu_index)


def module_folder(make: str) -> str:
    """Returns the folder from which the module of "module:function" is imported."""
    name = make.partition(":")[0]
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise UserError(f"make = {make}: there is no module {name}; add its folder to PYTHONPATH")
    depth = name.count(".") + (pathlib.Path(spec.origin).name == "__init__.py")
    return str(pathlib.Path(spec.origin).resolve().parents[depth])


def finished_result(folder: pathlib.Path, request: TrialRequest) -> TrialResult | None:
    """Returns what a trial wrote at its end, if it was given this request, on whatever GPU."""
    try:
        asked = json.loads((folder / REQUEST).read_text())
        result = TrialResult.from_dict(json.loads((folder / RESULT).read_text()))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    same = {**asked, "gpu_index": None} == {**json.loads(json.dumps(request.to_dict())), "gpu_index": None}
    return result if same else None


def measure_request(request: TrialRequest) -> TrialFigures:
    """Measures a request in this process."""
    import_jax()
    # Here, so that a failure to import jax is a result as well.
    from jepa_jax.experiments.measurement import measure, measure_own_step

    return measure_own_step(request) if request.make else measure(request)


def attempt(request: TrialRequest, measure: MeasureRequest = measure_request) -> TrialResult:
    """Measures a request in this process; an exception becomes a result with its reason."""
    try:
        return TrialResult(rows.OK, figures=measure(request))
    except UserError as error:
        return TrialResult(rows.REFUSED, str(error))
    except Exception as error:
        traceback.print_exc()
        text = f"{type(error).__name__}: {error}".strip()
        return TrialResult(rows.OUT_OF_MEMORY if is_out_of_memory(text) else rows.CRASHED, shortened(text))


def main(arguments: list[str], measure: MeasureRequest = measure_request) -> int:
    """Runs the process of a trial; checks replace `measure` to make it fail on purpose."""
    request_file, result_file = map(pathlib.Path, arguments)
    processes.end_with_parent()
    with contextlib.suppress(OSError):  # if the machine runs out of memory, the kernel kills the trial, not its parent
        pathlib.Path("/proc/self/oom_score_adj").write_text("1000")
    request = TrialRequest.from_dict(json.loads(request_file.read_text()))
    write_json(result_file, attempt(request, measure).to_dict())
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
