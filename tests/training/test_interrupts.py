"""Runs that are interrupted or killed: they end at once, keep their last step, and resume bit for bit."""

import json
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest

from jepa_jax.base.signals import Interrupted
from jepa_jax.evals.inference import load_encoder
from jepa_jax.program.workdir import Workdir
from tests.runs import WHOLE, Silent, rows, run

ROOT = pathlib.Path(__file__).parents[2]
PATIENCE = 1200  # seconds for a process to get anywhere on a busy machine


class Stops(Silent):
    """Sends a signal to this process when a line, a progress bar or a step ("step") begins with a marker."""

    def __init__(self, marker: str, signum: signal.Signals):
        super().__init__(self.hear)
        self.marker, self.signum, self.bars_before = marker, signum, 0

    def hear(self, text: str) -> None:
        if self.marker and text.startswith(self.marker):
            self.marker, self.bars_before = "", len(self.bars)
            os.kill(os.getpid(), self.signum)

    def advance(self, amount: int = 1, note: Callable[[], str] | None = None) -> None:
        if note is not None:
            self.hear("step")


@pytest.mark.slow
def test_a_run_interrupted_at_every_stage_ends_as_if_nothing_had_happened(tmp_path, tiny_run):
    cut = tmp_path / "cut"
    whole, expected = tiny_run
    stages = {  # marker: signal, steps taken by then
        "fits of the linear probe": (signal.SIGTERM, 0),  # of the untrained encoder
        "votes of k-NN": (signal.SIGINT, 0),
        "collapse watch": (signal.SIGTERM, 0),
        "step": (signal.SIGINT, 2),  # the metrics of step 1 are read after step 2 was dispatched
        "test": (signal.SIGINT, 6),  # the evaluation after the first epoch
        "epoch 1/2": (signal.SIGTERM, 6),
        "LiDAR": (signal.SIGINT, 12),  # after the last step
    }
    for marker, (signum, step) in stages.items():
        console = Stops(marker, signum)
        with pytest.raises(Interrupted) as stop:
            run(cut, console, **WHOLE)
        assert stop.value.exit_code == {signal.SIGTERM: 143, signal.SIGINT: 130}[signum]
        assert len(console.bars) <= console.bars_before + 1, marker  # nothing more was begun
        summary = json.loads((cut / "summary.json").read_text())
        assert summary["status"] == "interrupted" and summary["steps"] == step, marker
        assert Workdir(cut).has_checkpoint()
    resumed = run(cut, resume="must", **WHOLE)
    same = ("status", "params_sha256", "untrained_probe_accuracy", "untrained_knn_accuracy", "probe_accuracy", "lidar")
    assert [resumed[name] for name in same] == [expected[name] for name in same]
    assert [row["step"] for row in rows(cut) if "train/loss" in row] == list(range(1, 13))
    assert {row["step"] for row in rows(cut) if "eval/online_probe_accuracy" in row} == {6, 12}
    # The checkpoint holds the encoder that was measured, with calibrated statistics.
    images = np.random.default_rng(0).integers(0, 256, (5, 16, 16, 3), np.uint8)
    np.testing.assert_array_equal(load_encoder(cut)(images), load_encoder(whole)(images))


def signalled(workdir: pathlib.Path, marker: str, signum: signal.Signals) -> int:
    """Starts a run that computes what `run` does, sends it a signal at a line, and returns its exit code."""
    command = [sys.executable, "tests/training/run_tiny.py", str(workdir), marker]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    seen = [""]
    while not seen[-1].startswith(marker):
        seen.append(process.stderr.readline())
        assert seen[-1], "".join(seen)
    process.send_signal(signum)
    _, errors = process.communicate(timeout=PATIENCE)
    assert "bar: " not in errors, errors  # nothing more was begun
    return process.returncode


@pytest.mark.slow
def test_processes_that_are_signalled_or_killed_resume_bit_for_bit(tmp_path, tiny_run):
    assert signalled(tmp_path / "cut", "epoch 1/2", signal.SIGKILL) == -signal.SIGKILL
    assert signalled(tmp_path / "cut", "bar: linear probe", signal.SIGTERM) == 143
    assert Workdir(tmp_path / "cut").has_checkpoint()
    assert run(tmp_path / "cut")["params_sha256"] == tiny_run[1]["params_sha256"]
