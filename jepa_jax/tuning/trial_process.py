"""Runs a trial in a process of its own and says how it ended: nothing that happens there ends the one that asks.

A trial that runs out of memory may be told so by XLA, die in the middle of an allocation, or be killed by the kernel;
its log and its exit code together say which.
"""

import json
import pathlib
import shutil
import sys
from collections.abc import Callable
from typing import Any

import jepa_jax
from jepa_jax.base import processes
from jepa_jax.base.errors import EXIT_OK, UserError
from jepa_jax.base.files import write_json
from jepa_jax.config.schema import validate
from jepa_jax.runtime.gpus import only_gpu
from jepa_jax.runtime.memory import is_out_of_memory
from jepa_jax.tuning.trial import (
    CRASHED,
    OK,
    OUT_OF_MEMORY,
    REFUSED,
    TIMED_OUT,
    TrialRequest,
    is_limited,
    shortened,
)

REQUEST, RESULT = "request.json", "result.json"
CACHE = "compiled"  # programs of all trials of a directory: a repeat does not compile again
CACHED_FROM_SECONDS = 0.2  # of compilation
LAST_LINES = 20  # of a log, that may tell why a process ended
STOP_SECONDS = 1.0  # for a trial to end when it is asked to; it has nothing to save

Measurement = dict[str, Any]  # "status", "reason" and, with status "ok", the figures


def run_trial(
    request: TrialRequest,
    directory: pathlib.Path,
    *,
    time_limit: float,
    limit_flag: str = "",
    name: str = "trial",
    on_tick: Callable[[], None] = lambda: None,
) -> Measurement:
    """Measures one repeat in a new process.

    Args:
      directory: shared by the trials of a sweep, which keep their compiled programs there.
      time_limit: seconds after which the trial is killed.
      limit_flag: the user's flag that sets it, for the reason.
      name: of the folder in `directory` for request, result and log of this trial; what an earlier one left is removed.
      on_tick: called a few times a second.
    """
    try:
        validate(request.configuration())
        environment = child_environment(request, directory)
    except UserError as error:
        return {"status": REFUSED, "reason": str(error)}
    folder = directory / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_json(folder / REQUEST, request.as_dict())
    command = [sys.executable, "-m", "jepa_jax.tuning.trial", str(folder / REQUEST), str(folder / RESULT)]
    ended = processes.run(
        command,
        folder,
        environment=environment,
        timeout=time_limit,
        grace=STOP_SECONDS,
        on_tick=on_tick,
    )
    (folder / processes.PROCESS_FILE).unlink(missing_ok=True)
    result = finished_result(folder, request)
    # One that was done and hung while it closed was measured all the same.
    if result is not None and (result["status"] == OK or not ended.timed_out):
        return result
    if ended.timed_out:
        advice = f" ({limit_flag}: raise it for a slow machine)" if limit_flag else ""
        after = f"stopped after {time_limit:g} s{advice}"
        return {"status": TIMED_OUT, "reason": f"{after}; {_last(ended.message)}"}
    log = processes.tail(folder / processes.LOG)
    status, reason = explain_exit(ended.exit_code, log, limited=is_limited(request))
    return {"status": status, "reason": reason}


def child_environment(request: TrialRequest, directory: pathlib.Path) -> dict[str, str]:
    """What a trial's process has in its environment beside what this one has."""
    variables = {
        "JAX_COMPILATION_CACHE_DIR": str((directory / CACHE).resolve()),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": str(CACHED_FROM_SECONDS),
        # Whole programs alone: with kernels tuned for other trials, compiling would take as long as their order says.
        "JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES": "none",
        "PYTHONPATH": processes.python_path(pathlib.Path(jepa_jax.__file__).parents[1]),
    }
    return variables | only_gpu(request.gpu_index)


def finished_result(folder: pathlib.Path, request: TrialRequest) -> Measurement | None:
    """What a trial wrote at its end, if it was this request that it was given."""
    try:
        asked = json.loads((folder / REQUEST).read_text())
        result = json.loads((folder / RESULT).read_text())
    except (OSError, ValueError):
        return None
    return result if asked == json.loads(json.dumps(request.as_dict())) else None


def explain_exit(code: int, log: str, *, limited: bool) -> tuple[str, str]:
    """Exit code and log of a process that left no result -> status, reason.

    Args:
      limited: whether its address space was, so that a thread that cannot start means that memory ran out.
    """
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    told = [line for line in lines[-LAST_LINES:] if is_out_of_memory(line, limited)]
    how = f"killed by {processes.signal_name(code)}" if code < 0 else f"exit code {code}"
    if told:
        return OUT_OF_MEMORY, f"{shortened(told[-1])} ({how})"
    if how == "killed by SIGKILL":
        return OUT_OF_MEMORY, f"{how}: as the kernel does when the machine's memory is used up"
    if code == EXIT_OK:
        how = "ended without a result"
    return CRASHED, f"{how}; {_last(lines[-1] if lines else '')}"


def _last(message: str) -> str:
    return f"its last line: {shortened(message)}" if message else "it had said nothing"
