"""Several processes compute one run: the same numbers, one end for all of them, and a restart with any number."""

import contextlib
import functools
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from jepa_jax.base.companions import local_address
from jepa_jax.base.errors import EXIT_PROCESS_LOST
from jepa_jax.base.signals import Interrupted
from jepa_jax.data.sources import open_source
from jepa_jax.program.config import changed_config
from jepa_jax.program.restore import restore_state
from jepa_jax.runtime.mesh import make_mesh
from jepa_jax.training.run import train
from tests.flags import FAST_TO_COMPILE
from tests.runs import rows
from tests.training.run_processes import STOP_AT, configs
from tests.training.test_interrupts import Stops

ROOT = pathlib.Path(__file__).parents[2]
PATIENCE = 1200  # seconds on a busy machine


@contextlib.contextmanager
def two_processes(folder: pathlib.Path, *arguments: str):
    """Starts two processes with two devices each; yields them, their errors in files, and kills what is left."""
    flags = f"--xla_force_host_platform_device_count=2 {FAST_TO_COMPILE}"
    command = [sys.executable, "tests/training/run_processes.py", str(folder), *arguments]
    with contextlib.ExitStack() as stack:
        address = stack.enter_context(local_address())
        environment = os.environ | {"XLA_FLAGS": flags, "JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2"}
        started = []
        for index in range(2):
            errors = stack.enter_context(open(folder / f"errors_{index}", "w"))
            place = {"JAX_PROCESS_ID": str(index)}
            started.append(subprocess.Popen(command, cwd=ROOT, env=environment | place, stderr=errors, text=True))
            stack.callback(started[-1].kill)
        yield started


def exit_codes(processes) -> list[int]:
    """Waits for the end of all; what still runs after a long time is killed."""
    deadline = time.monotonic() + PATIENCE
    while None in (codes := [process.poll() for process in processes]):
        for process in processes if time.monotonic() > deadline else []:
            process.kill()
        time.sleep(0.05)
    return codes


def errors_of(folder: pathlib.Path, index: int) -> str:
    return (folder / f"errors_{index}").read_text()


COMPARED = ("batch_norm", "vit_ema", "emberformer")
RUNS = pytest.mark.parametrize(
    "name, trained",
    [pytest.param(name, name, marks=() if name == "batch_norm" else pytest.mark.slow) for name in COMPARED],
    indirect=["trained"],
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Returns a function that trains a config in two processes, once, and returns the folder."""

    @functools.cache
    def run(name: str) -> pathlib.Path:
        folder = tmp_path_factory.mktemp("two")
        with two_processes(folder, name) as processes:
            codes = exit_codes(processes)
        assert codes == [0, 0], errors_of(folder, 0) + errors_of(folder, 1)
        return folder

    return run


@pytest.fixture
def trained(request, runs):
    """A run of two processes; it is stopped by a signal to the second process, and resumed."""
    return runs(request.param)


def final_state(name: str, folder: pathlib.Path):
    config = configs()[name]
    spec = open_source(config.data, "train").spec
    return restore_state(config, folder, make_mesh(1, 1, jax.local_devices()), spec)[1]


def assert_equal_states(name: str, one: pathlib.Path, other: pathlib.Path) -> None:
    a, b = (jax.device_get(final_state(name, folder)) for folder in (one, other))

    def close(x: np.ndarray, y: np.ndarray) -> None:
        # Sums in another order round differently, and an activation at the kink of a ReLU may then fall on its other
        # side; a wrong slice of the batch or a missing part of the gradient changes the first digit.
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-3 * max(1.0, float(np.abs(x).max())))

    jax.tree.map(close, (a.params, a.stats, a.target), (b.params, b.stats, b.target))


@pytest.mark.slow
@RUNS
def test_two_processes_with_two_devices_equal_one_with_four(trained, tmp_path, name):
    expected = train(changed_config(configs()[name], {"mesh.data": 4}), tmp_path)
    summary = json.loads((trained / name / "summary.json").read_text())
    assert summary["status"] == "finished" and summary["steps"] == 20
    figures = ("probe_accuracy", "knn_accuracy", "untrained_probe_accuracy", "effective_rank", "average_precision")
    for figure in figures:
        if expected.get(figure) is not None:
            assert summary[figure] == pytest.approx(expected[figure], rel=2e-3), figure
    assert_equal_states(name, trained / name, tmp_path)
    losses = [
        [row["train/loss"] for row in rows(folder) if "train/loss" in row] for folder in (trained / name, tmp_path)
    ]
    assert len(losses[0]) == 20
    np.testing.assert_allclose(*losses, rtol=1e-4)
    assert (trained / name / "report.html").exists()


@pytest.mark.slow
@RUNS
def test_a_signal_to_one_process_stops_both_after_the_same_step(trained, name):
    assert [(trained / f"{name}_stopped_{index}").read_text() for index in range(2)] == ["143", "143"]
    steps = [row["step"] for row in rows(trained / name) if "train/loss" in row]
    assert steps == list(range(1, 21))  # none lost, none twice
    assert STOP_AT <= json.loads((trained / f"{name}_stopped/summary.json").read_text())["steps"] <= STOP_AT + 3


def test_processes_with_different_configs_are_refused_by_name(tmp_path):
    command = [sys.executable, "-m", "jepa_jax", "train", "--config=quickstart", f"--workdir={tmp_path / 'run'}"]
    with local_address() as address:
        command += [f"--coordinator={address}", "--num_processes=2"]
        processes = [
            subprocess.Popen(
                [*command, f"--process_id={index}", f"--config.optim.lr={0.1 + index}"],
                cwd=ROOT, stderr=subprocess.PIPE, text=True,
            )
            for index in range(2)
        ]  # fmt: skip
        assert exit_codes(processes) == [2, 2]
    errors = [process.stderr.read() for process in processes]
    for text in errors:
        assert "process 1 has another config than process 0" in text and "config.optim.lr: 0.1 -> 1.1" in text
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_when_a_process_is_killed_the_other_ends_with_a_message(tmp_path, victim):
    with two_processes(tmp_path, "line", f"--kill={victim}") as processes:
        codes = exit_codes(processes)
    errors = errors_of(tmp_path, 1 - victim)
    assert (codes[victim], codes[1 - victim]) == (-signal.SIGKILL, EXIT_PROCESS_LOST), errors
    assert f"error: process {victim} is gone" in errors


@pytest.mark.slow
@pytest.mark.parametrize("trained", ["vit_ema"], indirect=True)
def test_a_run_of_two_processes_continues_in_one_with_split_parameters(trained, tmp_path):
    shutil.copytree(trained / "vit_ema_stopped", tmp_path / "run")
    config = changed_config(configs()["vit_ema"], {"mesh.data": 2, "mesh.fsdp": -1})
    assert train(config, tmp_path / "run", resume="must")["steps"] == 20
    assert_equal_states("vit_ema", tmp_path / "run", trained / "vit_ema")


@pytest.mark.slow
@pytest.mark.parametrize("trained", ["batch_norm"], indirect=True)
def test_a_run_of_one_device_continues_on_eight(trained, tmp_path):
    config = configs()["batch_norm"]
    with pytest.raises(Interrupted):
        train(changed_config(config, {"mesh.data": 1}), tmp_path, console=Stops("epoch 2", signal.SIGTERM))
    assert train(config, tmp_path, resume="must")["steps"] == 20  # on all devices
    assert_equal_states("batch_norm", tmp_path, trained / "batch_norm")
