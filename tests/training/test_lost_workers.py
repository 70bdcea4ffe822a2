"""Runs whose workers die or stop: they end with a message and a checkpoint, hear signals, and leave nothing behind."""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import psutil
import pytest

from jepa_jax.program.workdir import Workdir

ROOT = pathlib.Path(__file__).parents[2]
PATIENCE = 1200  # seconds for a process to get anywhere on a busy machine


def command(workdir, source="shapes", **data):
    settings = {"num_workers": 2} | data
    return [
        sys.executable, "-m", "jepa_jax", "train", "--config=tests/tiny_config.py", f"--workdir={workdir}",
        "--config.mesh.data=1", f"--config.data.source={source}", "--config.eval.untrained=False",
        *(f"--config.data.{name}={value}" for name, value in settings.items()),
    ]  # fmt: skip


@pytest.fixture
def start():
    """Starts runs, in process groups of their own, and ends what is left of them."""
    started = []

    def start_run(*arguments, **data):
        run = command(*arguments, **data)
        process = subprocess.Popen(run, cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True)
        started.append(process)
        return process

    yield start_run
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stderr.close()


def wait_until(condition, process):
    give_up = time.monotonic() + PATIENCE
    while not condition():
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < give_up
        time.sleep(0.05)


def stopped_workers(process):
    children = psutil.Process(process.pid).children()
    return [child for child in children if child.status() == psutil.STATUS_STOPPED]


def summary(workdir):
    return json.loads((workdir / "summary.json").read_text())


@pytest.mark.slow
def test_workers_that_die_again_and_again_end_the_run_with_advice_and_a_checkpoint(tmp_path, start):
    process = start(tmp_path, "tests.data.failing_shapes:KilledShapes")
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 2, errors
    assert "Traceback" not in errors
    error = errors.splitlines()[-1]
    assert "warning: data worker" in errors and "was ended by SIGKILL; all workers are started again" in errors
    assert error.startswith("error: data worker") and "config.data.num_workers=0" in error
    assert "checkpoint of step 8 written" in error  # two workers, twice two batches each
    assert Workdir(tmp_path).has_checkpoint() and summary(tmp_path)["steps"] == 8


@pytest.mark.slow
def test_a_run_that_waits_for_a_stopped_worker_hears_sigterm_and_uses_no_named_memory(tmp_path, start):
    process = start(tmp_path, "tests.data.failing_shapes:StoppedShapes", worker_timeout=3600)
    wait_until(lambda: len(stopped_workers(process)) == 2, process)
    workers = stopped_workers(process)
    paths = {entry.path for one in [psutil.Process(process.pid), *workers] for entry in one.memory_maps()}
    assert any("memfd:jepa_jax-batch" in path for path in paths)
    assert not [path for path in paths if path.startswith("/dev/shm")]  # a kill would leave it behind
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 143, errors
    assert "SIGTERM: checkpoint of step" in errors
    assert Workdir(tmp_path).has_checkpoint() and summary(tmp_path)["status"] == "interrupted"
    assert not any(worker.is_running() for worker in workers)


@pytest.mark.slow
@pytest.mark.skipif(
    subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"], capture_output=True).returncode != 0,
    reason="may not mount a file system",
)
def test_a_tiny_shared_memory_does_not_matter(tmp_path):
    mount = 'mount -t tmpfs -o size=4k tmpfs /dev/shm && exec "$@"'
    run = ["unshare", "-m", "sh", "-c", mount, "sh", *command(tmp_path), "--config.train.max_steps=4"]
    ended = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert ended.returncode == 0, ended.stderr
    assert summary(tmp_path)["status"] == "finished"
