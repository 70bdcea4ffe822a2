"""A run submitted to SLURM: the job that is asked for, and what happens when it is preempted."""

import os
import signal
import sys
import threading
import time

import pytest
from submitit.core.utils import DelayedSubmission

from jepa_jax.cli.launch import LAUNCH, SlurmProcess
from tests.fake_slurm import install_fake_slurm

TRAINING = """
import pathlib, signal, sys, time
file = pathlib.Path(sys.argv[1])
signal.signal(signal.SIGTERM, lambda *_: (file.write_text("saved"), sys.exit(143)))
file.write_text("running")
time.sleep(600)
"""


def test_a_run_is_submitted_as_one_job_of_many_tasks(tmp_path, monkeypatch, capsys):
    install_fake_slurm(tmp_path, monkeypatch)
    monkeypatch.chdir(tmp_path)
    run = ["train", "--config=quickstart", "--workdir=runs/a"]
    assert LAUNCH.main(["-n", "16", "--slurm", "--slurm_options=--nodes=2 --time=24:00:00", "--", *run]) == 0
    assert "job 1" in capsys.readouterr().out
    script = (tmp_path / "slurm" / "1_submission.sh").read_text()
    for flag in ("ntasks=16", "nodes=2", "gpus-per-task=1", "time=24:00:00", "signal=USR2@120"):
        assert script.count(f"#SBATCH --{flag}\n") == 1, flag
    submitted = DelayedSubmission.load(tmp_path / "slurm" / "1_submitted.pkl").function
    assert submitted.command == (sys.executable, "-m", "jepa_jax", *run)


def test_a_preempted_run_saves_its_state_and_is_queued_again(tmp_path):
    file = tmp_path / "state"
    process = SlurmProcess((sys.executable, "-S", "-c", TRAINING, str(file)))
    queued = []
    before = signal.signal(signal.SIGUSR2, lambda *_: queued.append(process.checkpoint().function))

    def preempt():
        while not (file.exists() and file.read_text()):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGUSR2)

    threading.Thread(target=preempt, daemon=True).start()
    try:
        with pytest.raises(RuntimeError, match="exit code 143"):
            process()
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert file.read_text() == "saved"
    assert queued[0].command == process.command and queued[0].process is None
