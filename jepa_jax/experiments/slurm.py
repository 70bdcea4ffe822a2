"""Submits functions to SLURM through submitit (the extra `slurm`)."""

import pathlib
import shlex
from typing import TYPE_CHECKING, Any

from jepa_jax.base.errors import UserError
from jepa_jax.base.processes import python_path

if TYPE_CHECKING:
    import submitit

SPARE_SECONDS = 60  # of a job, beyond the time limit of its work


def make_executor(
    folder: pathlib.Path, options: str, name: str, time_limit: float | None = None, **parameters: Any
) -> "submitit.SlurmExecutor":
    """Returns an executor whose jobs have one GPU per task, unless the options say otherwise.

    Args:
      folder: keeps submitted scripts, logs and pickled arguments; has to be on a file system that the nodes share.
      options: flags of sbatch, separated by spaces: `--partition=gpu --exclusive`.
      name: of the jobs.
      time_limit: seconds of a job's work; None for the limit of the partition or of the options.
      **parameters: others of submitit, such as nodes and ntasks_per_node.
    """
    try:
        import submitit
    except ImportError:
        raise UserError("SLURM jobs are submitted by submitit: pip install 'jepa_jax[slurm]'") from None
    flags: dict[str, Any] = {"gres": "gpu:1"}
    if time_limit is not None:
        flags["time"] = -(-int(time_limit + SPARE_SECONDS) // 60)
    for option in shlex.split(options):
        key, equals, value = option.removeprefix("--").partition("=")
        if not option.startswith("--") or not key:
            raise UserError(f"--slurm_options={options}: {option} is not a flag of the form --name=value or --name")
        flags[key] = value if equals else True
    try:
        executor = submitit.SlurmExecutor(folder)
    except RuntimeError as error:
        raise UserError(f"{error} Submit from a node with sbatch and srun") from None
    setup = [f"export PYTHONPATH={shlex.quote(python_path())}"]
    executor.update_parameters(job_name=name, setup=setup, additional_parameters=flags, **parameters)
    return executor
