"""The loop as a user meets it: a run, its files, its ends, and what a wrong start is answered with."""

import json
import math
import os
import pathlib
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from jepa_jax import load_encoder
from jepa_jax.base.console import Console
from jepa_jax.base.errors import Diverged, UserError
from jepa_jax.base.signals import Interrupted
from jepa_jax.data.sources import open_source
from jepa_jax.evals.features import Split
from jepa_jax.evals.knn import knn_accuracy
from jepa_jax.program.workdir import Workdir
from jepa_jax.train import loop
from jepa_jax.train.loop import train
from tests.tiny import tiny_config

ROOT = pathlib.Path(__file__).parents[2]
SUMMARY_KEYS = {
    "probe_accuracy", "untrained_probe_accuracy", "untrained_knn_accuracy", "knn_accuracy", "feature_dim",
    "images_per_sec", "wall_seconds",
    "cpu_seconds", "steps", "epochs", "peak_memory_bytes", "compilations", "params_sha256", "status",
}  # fmt: skip


class Silent(Console):
    """A console that remembers its lines, and may act on one."""

    def __init__(self, on_line=lambda text: None):
        super().__init__(open(os.devnull, "w"))
        self.lines, self._on_line = [], on_line

    def line(self, text):
        self.lines.append(text)
        self._on_line(text)

    warn = line


def run(workdir, console=None, resume="auto", **overrides):
    return train(tiny_config(mesh__data=1, **overrides), workdir, resume=resume, console=console or Silent())


def rows(workdir):
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """One whole run, shared by the tests that only look at it."""
    workdir = tmp_path_factory.mktemp("runs") / "finished"
    return workdir, run(workdir, log__tensorboard=True)


def test_a_run_leaves_everything_it_promises(finished):
    workdir, summary = finished
    names = (
        "config.json",
        "environment.json",
        "metrics.jsonl",
        "summary.json",
        "views.png",
        "report.html",
        "checkpoints",
    )
    assert all((workdir / name).exists() for name in names)
    assert list((workdir / "tensorboard").glob("events*"))
    assert SUMMARY_KEYS <= json.loads((workdir / "summary.json").read_text()).keys()
    assert summary["steps"] == 12 and summary["epochs"] == 2 and summary["compilations"] == 1
    assert summary["feature_dim"] == 16 and 0 <= summary["probe_accuracy"] <= 100
    assert not [p for p in workdir.iterdir() if p.name.startswith(".")]


def test_steps_never_go_backwards_and_every_step_is_logged(finished):
    workdir, _ = finished
    steps = [row["step"] for row in rows(workdir)]
    assert steps == sorted(steps)
    losses = {row["step"]: row["train/loss"] for row in rows(workdir) if "train/loss" in row}
    assert sorted(losses) == list(range(1, 13)) and all(math.isfinite(value) for value in losses.values())
    assert any("eval/online_probe_accuracy" in row for row in rows(workdir))


def test_the_first_logged_rate_is_the_warm_up_rate(finished):
    workdir, _ = finished
    rates = [row["train/lr"] for row in rows(workdir) if "train/lr" in row]
    assert rates[0] == pytest.approx(1e-5) and max(rates) == pytest.approx(2e-3) and rates[-1] < 1e-3


def test_a_finished_run_is_not_run_again(finished):
    workdir, summary = finished
    console = Silent()
    assert run(workdir, console, log__tensorboard=True)["params_sha256"] == summary["params_sha256"]
    assert "finished already" in console.lines[0]


def test_load_encoder_gives_the_features_of_the_checkpoint(finished):
    workdir, summary = finished
    encode = load_encoder(workdir, batch_size=8)
    images = np.random.default_rng(0).integers(0, 256, (11, 16, 16, 3), np.uint8)
    features = encode(images)
    assert features.shape == (11, summary["feature_dim"]) and features.dtype == np.float32
    np.testing.assert_allclose(features[3:5], encode(images[3:5]), rtol=1e-5, atol=1e-6)
    # The encoder is the one that was measured: its features give the accuracy of the summary.
    config = tiny_config()
    splits = []
    for name in ("train", "test"):
        source = open_source(config.data, name)
        batch = source.batch(np.arange(len(source)))
        splits.append(Split(encode(batch["image"]), batch["label"]))
    settings = dict(k=config.eval.knn_k, temperature=config.eval.knn_temperature)
    assert knn_accuracy(*splits, 10, **settings) == pytest.approx(summary["knn_accuracy"], abs=0.01)
    with pytest.raises(UserError, match=r"takes uint8 \[N, 16, 16, 3\]"):
        encode(images.astype(np.float32))


def test_a_refused_start_does_not_stand_in_the_way_of_its_correction(tmp_path):
    with pytest.raises(UserError, match="batch_size"):
        run(tmp_path / "run", data__batch_size=4096)
    assert not list((tmp_path / "run").iterdir())
    Workdir(tmp_path / "run").check(tiny_config().to_dict(), "auto")


def test_another_config_is_refused_with_the_differing_keys(finished):
    workdir, _ = finished
    with pytest.raises(UserError, match=r"another config(.|\n)*config.optim.lr: 0.002 -> 0.5"):
        run(workdir, optim__lr=0.5)
    with pytest.raises(UserError, match="holds a run already"):
        run(workdir, resume="never")


def test_must_resume_refuses_an_empty_folder(tmp_path):
    with pytest.raises(UserError, match="no checkpoint to resume"):
        run(tmp_path / "new", resume="must")


def test_a_signal_at_the_last_step_keeps_the_encoder_that_will_be_measured(finished, tmp_path):
    whole, _ = finished

    class InterruptsLastEvaluation(Silent):
        def start(self, what, total, done=0):
            if what == "linear probe":
                os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted):
        run(tmp_path / "run", InterruptsLastEvaluation())
    resumed = run(tmp_path / "run")
    images = np.random.default_rng(0).integers(0, 256, (5, 16, 16, 3), np.uint8)
    np.testing.assert_array_equal(load_encoder(tmp_path / "run")(images), load_encoder(whole)(images))
    assert resumed["status"] == "finished"


def test_an_interrupted_run_goes_on_and_ends_as_if_nothing_had_happened(finished, tmp_path):
    _, whole = finished

    def interrupt(text):
        if text.startswith("epoch 1"):
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted) as stop:
        run(tmp_path / "run", Silent(interrupt))
    assert stop.value.exit_code == 143
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "interrupted"
    resumed = run(tmp_path / "run", resume="must")
    assert resumed["params_sha256"] == whole["params_sha256"]
    for name in ("untrained_probe_accuracy", "untrained_knn_accuracy"):
        assert resumed[name] == whole[name] is not None
    steps = [row["step"] for row in rows(tmp_path / "run") if "train/loss" in row]
    assert steps == list(range(1, 13))
    evaluated = [row["epoch"] for row in rows(tmp_path / "run") if "eval/online_probe_accuracy" in row]
    assert evaluated == [1, 2]


@pytest.mark.parametrize("pipeline, workers", [("device", 0), ("grain", 1)])
def test_the_pipeline_does_not_change_the_result(finished, tmp_path, pipeline, workers):
    _, whole = finished
    other = run(tmp_path / "run", data__pipeline=pipeline, data__num_workers=workers)
    assert other["params_sha256"] == whole["params_sha256"]


def test_another_seed_changes_the_result(finished, tmp_path):
    _, whole = finished
    assert run(tmp_path / "run", train__seed=1)["params_sha256"] != whole["params_sha256"]


def test_a_diverging_run_stops_with_the_step_the_terms_and_the_last_good_checkpoint(tmp_path):
    settings = dict(optim__name="sgd", optim__lr=1e6, optim__warmup_lr=1e6, train__checkpoint_every_steps=1)
    with pytest.raises(
        Diverged, match=r"step \d+: the loss or its gradient is not finite .*invariance.*good checkpoint: step \d+"
    ):
        run(tmp_path / "run", **settings)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "diverged" and summary["steps"] < 12


@pytest.mark.parametrize(
    "overrides, message",
    [
        (dict(data__batch_size=4096), r"config.data.batch_size = 4096: the train split has 96 samples"),
        (dict(data__source="cifar10", data__dir="nowhere", data__image_size=32), r"nowhere.*prepare_data"),
        (dict(data__source="imagenet"), r"data.source = imagenet"),
        (dict(model__patch_size=64), r"model.patch_size = 64"),
    ],
)
def test_a_wrong_start_is_answered_before_anything_is_compiled(tmp_path, overrides, message):
    with pytest.raises(UserError, match=message):
        run(tmp_path / "run", **overrides)


def test_a_batch_that_does_not_divide_over_the_devices_is_refused(tmp_path):
    assert jax.device_count() == 8
    config = tiny_config(data__batch_size=12)
    with pytest.raises(UserError, match=r"config.data.batch_size = 12 .*8 devices; use a multiple of 8"):
        train(config, tmp_path / "run", console=Silent())


def test_a_workdir_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match=r"file.*choose another place"):
        run(tmp_path / "file" / "run")


def command(workdir, *extra):
    return [
        sys.executable, "scripts/train.py", f"--config={ROOT}/tests/tiny_config.py", f"--workdir={workdir}", *extra,
    ]  # fmt: skip


def test_a_killed_process_resumes_bit_for_bit(tmp_path):
    environment = {**os.environ, "XLA_FLAGS": ""}

    def start(workdir):
        return subprocess.Popen(
            command(workdir), cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    reference = start(tmp_path / "whole")
    output, errors = reference.communicate(timeout=300)
    assert reference.returncode == 0, errors.decode()
    expected = json.loads(output.decode().splitlines()[-1])["params_sha256"]

    victim = start(tmp_path / "killed")
    deadline = time.monotonic() + 300
    while not Workdir(tmp_path / "killed").has_checkpoint() and time.monotonic() < deadline:
        time.sleep(0.02)
        assert victim.poll() is None, victim.communicate()[1].decode()
    victim.kill()
    victim.wait()
    resumed = start(tmp_path / "killed")
    output, errors = resumed.communicate(timeout=300)
    assert resumed.returncode == 0, errors.decode()
    assert b"resumed at step" in errors
    assert json.loads(output.decode().splitlines()[-1])["params_sha256"] == expected


@pytest.mark.parametrize(
    "extra, message",
    [
        (["--config.data.batchsize=3"], "batch_size"),
        (["--config.data.batch_size=abc"], "batch_size=abc"),
        (["--config=nowhere.py"], "nowhere.py"),
        (["--config.data.batch_size", "64", "word"], "word"),
    ],
)
def test_flags_that_cannot_be_get_one_line_and_exit_code_2(tmp_path, extra, message):
    result = subprocess.run(command(tmp_path / "run", *extra), cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 2
    assert message in result.stderr and result.stderr.startswith("error: ") and "Traceback" not in result.stderr


def test_the_script_answers_mistakes_with_one_line_and_exit_code_2(tmp_path):
    result = subprocess.run(
        command(tmp_path / "run", "--config.data.batch_size=100000"), cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 2
    assert result.stderr.strip().startswith("error: config.data.batch_size = 100000")
    assert "Traceback" not in result.stderr


def test_memory_that_runs_out_ends_with_what_to_change(tmp_path, monkeypatch):
    def no_memory(*arguments):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 12345 bytes.")

    monkeypatch.setattr(loop, "run_steps", no_memory)
    with pytest.raises(UserError, match="batch_size = 16: this machine's memory is used up; use a smaller batch"):
        train(tiny_config(), tmp_path, console=Silent())


def test_no_progress_bar_runs_ahead_of_its_work(tmp_path):
    class Bars(Silent):
        def __init__(self):
            super().__init__()
            self.overrun = []

        def start(self, what, total, done=0):
            self.what, self.left = what, total - done

        def advance(self, amount=1, note=None):
            self.left -= amount
            if self.left < 0:
                self.overrun.append(self.what)

    bars = Bars()
    train(tiny_config(optim__epochs=2.0, eval__every_epochs=0, eval__knn_every_epochs=0), tmp_path, console=bars)
    assert bars.overrun == []
