"""Starts several processes of one run on this machine, or as one job of SLURM, and ends them together.

  jepa-jax launch -n 2 -- train --config=rapid --workdir=runs/rapid
  jepa-jax launch -n 16 --slurm --slurm_options="--nodes=2 --time=24:00:00" -- train --config=rapid --workdir=runs/rapid

Each process gets its share of the GPUs (--devices of them, by default all divided evenly) or, on a CPU, --devices
virtual devices. A signal is passed on to all: they agree on a step, save it and exit. If one is lost, the others end
with a message within seconds, and the same command continues from the newest checkpoint. The exit code is 5 if a
process was lost, or else that of the first one that failed.

--slurm submits the processes, with one GPU each unless --devices says otherwise, and returns. A job that is preempted
or reaches its time limit saves a checkpoint and is queued again (docs/guides/many_devices.md).
"""

import os
import pathlib
import secrets
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from jepa_jax.base.companions import PLACE_VARIABLES, TOKEN_VARIABLE, local_address, run_companions
from jepa_jax.base.console import Console
from jepa_jax.base.errors import UserError
from jepa_jax.base.processes import has_ended, wait_until
from jepa_jax.cli.command import Command, Result
from jepa_jax.cli.flags import Arguments, Parser

GRACE_SECONDS = 60.0  # for a checkpoint, after another process has failed


def add_flags(parser: Parser) -> None:
    parser.add_flag("processes", "N", "processes to start; also -n N", kind=int, least=1, required=True, short="n")
    meaning = "devices of each process: GPUs, or virtual CPU devices; 0 = GPUs divided by N, or one CPU device"
    parser.add_flag("devices", "K", meaning, 0, least=0)
    parser.add_switch("slurm", "submit the processes as one SLURM job")
    parser.add_flag("slurm_options", "FLAGS", "flags of sbatch, separated by spaces", "")
    parser.add_words("command", "train [flags of train], after --", least=0, most=None)


def run_launch(arguments: Arguments, console: Console) -> Result:
    from jepa_jax.runtime.gpus import count_gpus

    command, count = arguments.command, arguments.processes
    if command[:1] != ["train"]:
        raise UserError("launch: give a train command after --, e.g. launch -n 2 -- train --config=quickstart ...")
    if arguments.slurm:
        from jepa_jax.experiments.slurm import make_executor

        flags = {"ntasks": count, "gpus_per_task": arguments.devices or 1}
        executor = make_executor(pathlib.Path("slurm").resolve(), "jepa-jax", arguments.slurm_options, **flags)
        job = executor.submit(SlurmProcess((sys.executable, "-m", "jepa_jax", *command)))
        return Result([], f"Submitted as job {job.job_id}; its logs are in {executor.folder}.")
    gpus = count_gpus()
    share = arguments.devices or gpus // count
    if gpus and not 0 < share * count <= gpus:
        raise UserError(f"-n {count} --devices={arguments.devices}: this machine has {gpus} GPUs; use fewer")
    if idle := max(0, gpus - share * count):
        console.warn(f"-n {count}: {idle} GPUs are not used; choose a number that divides them")
    token = {TOKEN_VARIABLE: secrets.token_hex(16)}  # nobody else can join
    with local_address() as address:
        environments = [
            token
            | dict(zip(PLACE_VARIABLES, (address, str(count), str(index)), strict=True))
            | devices_of(index, share, are_gpus=gpus > 0)
            for index in range(count)
        ]
        code = run_companions([sys.executable, "-m", "jepa_jax", *command], environments, grace=GRACE_SECONDS)
    return Result([], "", code)


class SlurmProcess:
    """One process of a run under SLURM, as submitit calls it."""

    def __init__(self, command: Sequence[str]):
        self.command = command
        self.process: subprocess.Popen[bytes] | None = None

    def __call__(self) -> None:
        self.process = subprocess.Popen(self.command)
        if code := self.process.wait():
            raise RuntimeError(f"exit code {code}")

    def checkpoint(self) -> Any:
        """Stops the run, which saves its state; returns what to queue again, which resumes from it."""
        from submitit.helpers import DelayedSubmission

        process = self.process
        if process is not None and not has_ended(process):
            os.kill(process.pid, signal.SIGTERM)
            wait_until(lambda: has_ended(process), GRACE_SECONDS)  # `process.wait` is what the signal interrupted
        return DelayedSubmission(SlurmProcess(self.command))


def devices_of(index: int, share: int, *, are_gpus: bool) -> dict[str, str]:
    """Returns the variables that give a process its share of the GPUs, or so many virtual CPU devices."""
    if are_gpus:
        return {"JAX_LOCAL_DEVICE_IDS": ",".join(str(index * share + i) for i in range(share))}
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={share}".strip()
    return {"XLA_FLAGS": flags} if share else {}


LAUNCH = Command("launch", __doc__, add_flags, run_launch, uses_jax=False)
