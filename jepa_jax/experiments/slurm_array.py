"""A sweep as an array of SLURM jobs: one task per repeat, each on a GPU of its own, from a request file.

`write_array` writes a request for every repeat that is not measured yet and a script for sbatch. Each task writes its
result beside its request, so that `collect` only has to read files; it may be called while tasks are still running.
"""

import dataclasses
import pathlib
import shlex
from collections.abc import Sequence
from typing import Any

from jepa_jax.base import processes
from jepa_jax.base.errors import EXIT_OK, UserError
from jepa_jax.base.files import write_atomically, write_json
from jepa_jax.base.runner import EXIT_NO_RESULT
from jepa_jax.data.sources import open_source
from jepa_jax.experiments import trial_process
from jepa_jax.experiments.recommendation import recommend
from jepa_jax.experiments.rows import OK, REFUSED, TIMED_OUT, SweepRow, TrialResult
from jepa_jax.experiments.settings import TrialRequest
from jepa_jax.experiments.sweep import Document, Sweep, load_document, make_document, open_trials, trial_name
from jepa_jax.experiments.trial_process import PACKAGE_PARENT, REQUEST, RESULT, explain_exit, finished_result
from jepa_jax.runtime.allocator import pool_variables

SCRIPT, LIST, EXIT_CODE = "array.sbatch", "trials.txt", "exit_code"
KILLED_BY_TIMEOUT = 124  # exit code of `timeout`
DEFAULT_OPTIONS = "--gres=gpu:1"


def write_array(sweep: Sweep, *, time_limit: float, resume: bool, slurm_options: str) -> dict[str, Any]:
    """Writes requests and script; returns the object that the command prints.

    Args:
      time_limit: seconds of a task.
      resume: whether there are results to continue.
      slurm_options: flags of sbatch, separated by spaces.
    """
    header, rows = load_document(sweep, resume)
    if not sweep.use_dummy_data:
        open_source(sweep.config.data, "train")  # reports missing data now, instead of in every task
    rows = _collected(sweep, rows, time_limit)
    names = []
    for index, number in open_trials(rows, sweep.repeats):
        request, folder = sweep.request(rows[index].combination), sweep.experiment.folder / trial_name(index, number)
        folder.mkdir(parents=True, exist_ok=True)
        for old in (RESULT, EXIT_CODE):
            (folder / old).unlink(missing_ok=True)
        write_json(folder / REQUEST, request.to_dict())
        names.append(folder.name)
    sweep.experiment.folder.mkdir(parents=True, exist_ok=True)
    sweep.output.parent.mkdir(parents=True, exist_ok=True)
    sweep.experiment.save(make_document(header, rows))
    script = sweep.experiment.folder / SCRIPT
    write_atomically(script.with_name(LIST), "".join(f"{name}\n" for name in names))
    write_atomically(script, array_script(sweep, len(names), time_limit, slurm_options))
    return {"tasks": len(names), "script": str(script), "output_json": str(sweep.output), "exit_code": EXIT_OK}


def array_script(sweep: Sweep, tasks: int, time_limit: float, slurm_options: str) -> str:
    """Returns the text of the script; its task number N measures line N + 1 of the list of trials."""
    folder = sweep.experiment.folder.resolve()
    minutes = -(-int(time_limit + 60) // 60)
    options = [*shlex.split(DEFAULT_OPTIONS), f"--time={minutes}", *shlex.split(slurm_options)]
    # sbatch takes the last of several values of an option, so that the user's win.
    lines = [f"#SBATCH {option}" for option in options]
    variables = {
        "PYTHONPATH": processes.python_path(PACKAGE_PARENT),
        "JAX_ENABLE_COMPILATION_CACHE": "false",  # every repeat is compiled anew
        **pool_variables(sweep.memory_fraction, {}),
    }
    exports = [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    command = " ".join(map(shlex.quote, trial_process.TRIAL_COMMAND))
    return "\n".join([
        "#!/bin/bash",
        "#SBATCH --job-name=jepa-jax-sweep",
        f"#SBATCH --array=0-{max(tasks - 1, 0)}",
        f"#SBATCH --output={folder}/slurm_%a.txt",
        *lines,
        *exports,
        f"cd {shlex.quote(str(pathlib.Path.cwd()))}",
        f"folder={shlex.quote(str(folder))}",
        f'trial="$folder/$(sed -n "$((SLURM_ARRAY_TASK_ID + 1))p" "$folder/{LIST}")"',
        "SECONDS=0",
        f'timeout --kill-after=5 {time_limit:g} {command} "$trial/{REQUEST}" "$trial/{RESULT}" \\',
        f'  > "$trial/{processes.LOG}" 2>&1',
        "code=$?",
        # One that ignores the first signal is killed, as one that takes too much memory is.
        f'if [ "$code" = 137 ] && [ "$SECONDS" -ge {int(time_limit)} ]; then code={KILLED_BY_TIMEOUT}; fi',
        f'echo "$code" > "$trial/{EXIT_CODE}"',
        "",
    ])  # fmt: skip


def collect(sweep: Sweep, *, time_limit: float, fixed_batch: int | None = None) -> tuple[int, Document, int]:
    """Reads the results of the tasks that have ended; returns an exit code, the document, and how many are missing."""
    if not sweep.output.exists():
        raise UserError(f"--output_json = {sweep.output}: no sweep was begun there; begin it with --slurm_array")
    header, rows = load_document(sweep, resume=True)
    rows = _collected(sweep, rows, time_limit)
    document = make_document(header, rows)
    document["conclusion"] = recommend(rows, config=sweep.config, fixed_batch=fixed_batch).to_dict()
    sweep.experiment.save(document)
    code = EXIT_OK if any(row.status == OK for row in rows) else EXIT_NO_RESULT
    return code, document, len(list(open_trials(rows, sweep.repeats)))


def _collected(sweep: Sweep, rows: Sequence[SweepRow], time_limit: float) -> list[SweepRow]:
    """Returns the rows with every repeat that has ended since; a row that fails has no more repeats to come."""
    rows = list(rows)
    for index, number in open_trials(rows, sweep.repeats):
        folder = sweep.experiment.folder / trial_name(index, number)
        result = task_result(folder, sweep.request(rows[index].combination), time_limit)
        if result is not None:
            rows[index] = rows[index].with_repeat(dataclasses.replace(result, round=number))
    return rows


def task_result(folder: pathlib.Path, request: TrialRequest, time_limit: float) -> TrialResult | None:
    """Returns how a task ended; None if it has not."""
    try:
        request.configuration()
    except UserError as error:
        return TrialResult(REFUSED, str(error))
    result = finished_result(folder, request)
    if result is not None:
        return result
    try:
        code = int((folder / EXIT_CODE).read_text())
        log = processes.tail(folder / processes.LOG)
    except (OSError, ValueError):
        return None
    if code == KILLED_BY_TIMEOUT:
        return TrialResult(TIMED_OUT, f"stopped after {time_limit:g} s (--time_limit: raise it for a slow machine)")
    return explain_exit(128 - code if code > 128 else code, log)  # the shell adds 128 to a signal's number
