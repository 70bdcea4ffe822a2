"""Data that disappear or hang during a run: its last step is saved, what is missing is named, and signals are heard."""

import json
import os
import signal
import threading

import pytest

from jepa_jax.base.errors import DataLost
from jepa_jax.base.signals import Interrupted
from jepa_jax.program.workdir import Workdir
from tests.data.failing_shapes import LostShapes
from tests.runs import Silent, run

SOURCE = {"data__source": "tests.data.failing_shapes:LostShapes", "data__num_workers": 0, "eval__untrained": False}


@pytest.fixture
def lose(monkeypatch):
    """Returns a console that lets the data have a fault from a line or bar on, and then sends a signal."""

    def console(fault: str, marker: str, signum: signal.Signals | None = None) -> Silent:
        def hear(text: str) -> None:
            if text.startswith(marker) and not LostShapes.fault:
                monkeypatch.setattr(LostShapes, "fault", fault)
                if signum:
                    threading.Timer(1.0, os.kill, (os.getpid(), signum)).start()

        return Silent(hear)

    yield console
    monkeypatch.undo()


def summary(folder):
    return json.loads((folder / "summary.json").read_text())


def checkpoint(folder):
    (newest,) = Workdir(folder).checkpoints.glob("step_*")
    return int(newest.name.removeprefix("step_"))


def test_data_that_are_gone_cost_no_step_and_the_run_continues_when_they_are_back(tmp_path, lose, monkeypatch):
    console = lose("gone", "epoch 1/2")
    with pytest.raises(DataLost, match="/server/shapes: cannot be read any more .*; checkpoint of step .* written"):
        run(tmp_path, console, **SOURCE)
    reached = summary(tmp_path)["steps"]
    assert 6 <= reached == checkpoint(tmp_path) and summary(tmp_path)["status"] == "interrupted"
    assert "/server/shapes" in summary(tmp_path)["reason"] and summary(tmp_path)["data_identity"]["train"]["sha256"]
    assert any("no batch statistics for evaluations" in line for line in console.lines)
    monkeypatch.setattr(LostShapes, "fault", "")
    resumed = run(tmp_path, **SOURCE)
    assert resumed["status"] == "finished" and resumed["steps"] == 12


IN_TRAINING, IN_EVALUATION = "epoch 1/2", "test"  # the line and the bar after which the data are gone


@pytest.mark.parametrize("marker", [IN_EVALUATION, pytest.param(IN_TRAINING, marks=pytest.mark.slow)])
def test_a_run_whose_data_hang_hears_sigterm_and_saves_its_last_step(tmp_path, lose, marker):
    with pytest.raises(Interrupted) as stop:
        run(tmp_path, lose("hangs", marker, signal.SIGTERM), **SOURCE)
    assert stop.value.exit_code == 143
    assert summary(tmp_path)["status"] == "interrupted" and summary(tmp_path)["steps"] == checkpoint(tmp_path) >= 6


@pytest.mark.slow
@pytest.mark.parametrize("marker", [IN_TRAINING, IN_EVALUATION])
def test_a_read_that_takes_longer_than_the_limit_is_named(tmp_path, lose, marker):
    expected = "/server/shapes/0: not read within 10 s; .*config.data.worker_timeout; checkpoint of step"
    with pytest.raises(DataLost, match=expected):
        run(tmp_path, lose("hangs", marker), data__worker_timeout=10.0, **SOURCE)
    assert summary(tmp_path)["steps"] == checkpoint(tmp_path)
