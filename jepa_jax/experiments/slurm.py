"""Submits functions to SLURM through submitit (the extra `slurm`)."""

import pathlib
import shlex
from typing import TYPE_CHECKING, Any

from jepa_jax.base.classes import import_extra
from jepa_jax.base.errors import UserError
from jepa_jax.base.processes import python_path

if TYPE_CHECKING:
    import submitit

SIGNAL_SECONDS = 120  # before the end of a job's time, when a run is asked to save a checkpoint


def make_executor(folder: pathlib.Path, name: str, options: str, **flags: Any) -> "submitit.SlurmExecutor":
    """Returns an executor that submits jobs.

    Args:
      folder: keeps submitted scripts, logs and pickled arguments; has to be on a file system that the nodes share.
      name: of the jobs.
      options: flags of sbatch as the user gives them, separated by spaces: `--partition=gpu --exclusive`.
      **flags: flags of sbatch that the options may replace.
    """
    submitit = import_extra("submitit", "SLURM jobs", "slurm")
    for option in shlex.split(options):
        key, equals, value = option.removeprefix("--").partition("=")
        if not option.startswith("--") or not key:
            raise UserError(f"--slurm_options={options}: {option} is not a flag of the form --name=value or --name")
        flags[key.replace("-", "_")] = value if equals else True
    try:
        executor = submitit.SlurmExecutor(folder)
    except RuntimeError as error:
        raise UserError(f"{error} Submit from a node with sbatch and srun") from None
    executor.update_parameters(
        job_name=name,
        setup=[f"export PYTHONPATH={shlex.quote(python_path())}"],
        signal_delay_s=SIGNAL_SECONDS,
        additional_parameters=flags,
    )
    return executor
