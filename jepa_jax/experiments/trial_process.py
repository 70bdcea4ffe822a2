"""Runs a trial in its own process and explains how it ended, so that no failure there ends its parent.

A trial that runs out of memory may be told so by XLA, die in the middle of an allocation, or be killed by the kernel;
its log and its exit code together say which.
"""

import json
import os
import pathlib
import shutil
import sys
from collections.abc import Callable, Mapping
from typing import Any

from jepa_jax.base import processes
from jepa_jax.base.errors import EXIT_OK, UserError
from jepa_jax.base.files import write_json
from jepa_jax.base.runner import Runner, Task
from jepa_jax.experiments.rows import CRASHED, OK, OUT_OF_MEMORY, REFUSED, TIMED_OUT, TrialResult
from jepa_jax.experiments.settings import TrialRequest
from jepa_jax.experiments.trial import shortened
from jepa_jax.runtime.allocator import pool_fraction, pool_variables
from jepa_jax.runtime.gpus import only_gpu
from jepa_jax.runtime.memory import is_out_of_memory

TRIAL_COMMAND: tuple[str, ...] = (
    sys.executable,
    "-m",
    "jepa_jax.experiments.trial",
)  # + request, result
PACKAGE_PARENT = pathlib.Path(__file__).resolve().parents[2]
REQUEST, RESULT = "request.json", "result.json"
CACHE = "compiled"  # programs of all trials of a folder: on CPUs a repeat is not compiled again
CACHED_FROM_SECONDS = 0.2  # of compilation
LAST_LINES = 20  # of a log, which may tell why a process ended
STOP_SECONDS = 1.0  # for a trial to end when it is asked to; it has nothing to save


def run_trial(
    runner: Runner,
    request: TrialRequest,
    *,
    time_limit: float,
    limit_flag: str = "",
    name: str = "trial",
    reached: Callable[[], float] = lambda: 0.0,
) -> TrialResult:
    """Measures one repeat in a new process.

    Args:
      runner: its folder is shared by the trials of a sweep, which keep their compiled programs there.
      time_limit: seconds after which the trial is killed.
      limit_flag: flag that sets the limit, named in the reason.
      name: folder for request, result and log; what an earlier trial left there is removed.
      reached: progress within the trial.
    """
    try:
        request.configuration()
        environment = child_environment(request, runner.folder)
    except UserError as error:
        return TrialResult(REFUSED, str(error))
    folder = runner.folder / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_json(folder / REQUEST, request.to_dict())
    command = [*TRIAL_COMMAND, str(folder / REQUEST), str(folder / RESULT)]
    ended = runner.run(Task(name, command, request.combination.label, time_limit, environment, reached))
    result = finished_result(folder, request)
    # A trial that was done and hung while it closed was measured all the same.
    if result is not None and (result.status == OK or not ended.timed_out):
        return result
    if ended.timed_out:
        advice = f" ({limit_flag}: raise it for a slow machine)" if limit_flag else ""
        return TrialResult(TIMED_OUT, f"stopped after {time_limit:g} s{advice}; {_last_line(ended.message)}")
    return explain_exit(ended.exit_code, processes.tail(folder / processes.LOG))


def device_options(hardware: Mapping[str, Any], memory_fraction: float | None) -> dict[str, Any]:
    """Returns the fields of a request that depend on whether there is a GPU.

    Args:
      hardware: of `provenance.describe_hardware`.
      memory_fraction: of the GPU's memory, as asked for; by default what the environment says, which training will use.
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
        "PYTHONPATH": processes.python_path(PACKAGE_PARENT),
    }
    if request.compile_anew:
        variables["JAX_ENABLE_COMPILATION_CACHE"] = "false"
    return variables | pool_variables(request.memory_fraction, os.environ) | only_gpu(request.gpu_index)


def finished_result(folder: pathlib.Path, request: TrialRequest) -> TrialResult | None:
    """Returns what a trial wrote at its end, if it was given this request."""
    try:
        asked = json.loads((folder / REQUEST).read_text())
        result = TrialResult.from_dict(json.loads((folder / RESULT).read_text()))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return result if asked == json.loads(json.dumps(request.to_dict())) else None


def explain_exit(code: int, log: str) -> TrialResult:
    """Explains the end of a process that left no result, from its exit code and log."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    told = [line for line in lines[-LAST_LINES:] if is_out_of_memory(line)]
    how = f"killed by {processes.signal_name(code)}" if code < 0 else f"exit code {code}"
    if told:
        return TrialResult(OUT_OF_MEMORY, f"{shortened(told[-1])} ({how})")
    if how == "killed by SIGKILL":
        return TrialResult(OUT_OF_MEMORY, f"{how}: as the kernel does when the machine's memory is used up")
    if code == EXIT_OK:
        how = "ended without a result"
    return TrialResult(CRASHED, f"{how}; {_last_line(lines[-1] if lines else '')}")


def _last_line(message: str) -> str:
    return f"its last line: {shortened(message)}" if message else "its log is empty"
