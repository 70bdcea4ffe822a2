"""Runs as a user meets them: their files, their summary, and how a wrong start is answered."""

import json
import math
import os
import signal

import jax
import numpy as np
import pytest

from jepa_jax.base.console import QuietConsole
from jepa_jax.base.errors import Diverged, UserError
from jepa_jax.base.signals import Interrupted
from jepa_jax.evals.evaluators import Evaluator, Stage
from jepa_jax.program.checksums import step_folders
from jepa_jax.training.run import train
from jepa_jax.training.setup import Hooks
from jepa_jax.training.steps import Steps
from tests.programs import shared_programs
from tests.runs import WHOLE, Silent, rows, run, unlabelled
from tests.sequence_methods import LineMethod
from tests.tiny import tiny_config

SUMMARY_KEYS = {
    "probe_held_out_accuracy", "untrained_probe_held_out_accuracy",
    "probe_accuracy", "untrained_probe_accuracy", "untrained_knn_accuracy", "knn_accuracy", "online_probe_accuracy",
    "feature_dim", "images_per_sec", "wall_seconds", "cpu_seconds", "steps", "epochs", "peak_memory_bytes",
    "checkpoint_bytes",
    "compilations", "params_sha256", "status", "effective_rank", "lidar", "collapse_warning", "skipped_images",
    "failed_evaluators", "evaluation_note", "alignment", "uniformity",
    "host_seconds", "num_classes", "baselines", "data_identity", "probe_train_images", "probe_test_images",
    "chance_accuracy",
}  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """One whole run, shared by the tests that only look at it."""
    workdir, console = tmp_path_factory.mktemp("runs") / "finished", Silent()
    return workdir, run(workdir, console, log__tensorboard=True, **WHOLE), console


def test_a_run_leaves_everything_it_promises(finished):
    workdir, summary, _ = finished
    names = ("config.json", "environment.json", "metrics.jsonl", "summary.json", "views.png", "checkpoints")
    assert all((workdir / name).exists() for name in names)
    assert list((workdir / "tensorboard").glob("events*"))
    assert json.loads((workdir / "summary.json").read_text()).keys() == SUMMARY_KEYS
    assert None not in [summary[name] for name in SUMMARY_KEYS - {"collapse_warning"}]
    assert summary["steps"] == 12 and summary["epochs"] == 2 and summary["compilations"] == 1
    assert summary["feature_dim"] == 16 and 0 <= summary["probe_accuracy"] <= 100
    [(_, newest)] = step_folders(workdir / "checkpoints")
    assert summary["checkpoint_bytes"] == sum(path.stat().st_size for path in newest.rglob("*") if path.is_file())
    assert 1 <= summary["effective_rank"] <= 16 and 1 <= summary["lidar"] <= 16
    assert 0 < summary["alignment"] < 4 and -4 < summary["uniformity"] < 0
    with np.load(workdir / "exhibits" / "collapse.npz") as shown:
        shapes = {stage: rows.shape for stage, rows in shown.items()}
    rows_of, maps = dict.fromkeys(("untrained", "final"), (12, 6, 16, 16, 3)), {"untrained_map", "final_map"}
    of_map = {"mapped": (96, 16, 16, 3), "mapped_labels": (96,), "classes": (10,)}
    assert shapes == rows_of | dict.fromkeys(maps, (96, 2)) | of_map
    assert not [p for p in workdir.iterdir() if p.name.startswith(".")]


def test_a_run_says_at_once_what_it_is(finished):
    lines = finished[2].lines[:5]
    assert lines[0].split() == ["method", "image_jepa"]
    assert lines[1].startswith("encoder  patchnet: ") and "trainable" in lines[1]
    assert "12 steps, 2 epochs" in lines[2] and "1 of 8 x cpu" in lines[3]
    assert lines[4] == "data     shapes: 96 train and 32 test images, 10 classes"


def test_steps_never_go_backwards_and_every_step_is_logged(finished):
    found = rows(finished[0])
    assert [row["step"] for row in found] == sorted(row["step"] for row in found)
    losses = {row["step"]: row["train/loss"] for row in found if "train/loss" in row}
    assert sorted(losses) == list(range(1, 13)) and all(math.isfinite(value) for value in losses.values())
    assert {row["step"] for row in found if "eval/online_probe_accuracy" in row} == {6, 12}
    assert {row["step"] for row in found if "collapse/relative_spread" in row} == {0, 6, 12}


def test_the_first_logged_rate_is_the_warm_up_rate(finished):
    rates = [row["train/lr"] for row in rows(finished[0]) if "train/lr" in row]
    assert rates[0] == pytest.approx(1e-5) and max(rates) == pytest.approx(2e-3) and rates[-1] < 1e-3


def test_a_finished_run_is_not_run_again(finished):
    workdir, summary, _ = finished
    console = Silent()
    assert run(workdir, console, log__tensorboard=True, **WHOLE)["params_sha256"] == summary["params_sha256"]
    assert "finished already" in console.lines[0]


def test_without_a_console_only_warnings_are_shown(capsys):
    console = QuietConsole()
    console.line("progress")
    console.start("train", 10)
    console.advance(1)
    console.warn("look here")
    assert capsys.readouterr().err == "warning: look here\n"


@pytest.mark.parametrize(
    "overrides, message",
    [
        (dict(data__batch_size=4096), r"batch_size = 4096: the train split has 96 "),
        (dict(data__source="cifar10", data__dir="nowhere", data__image_size=32), r"nowhere.*prepare"),
        (dict(data__source="imagenet"), r"data.source = 'imagenet'"),
        (dict(data__batch_size=12, mesh__data=8), r"config.data.batch_size = 12 .*8 devices; use a multiple of 8"),
    ],
)
def test_a_refused_run_leaves_no_folder(tmp_path, overrides, message):
    with pytest.raises(UserError, match=message):
        train(tiny_config(**overrides), tmp_path / "new" / "run", console=Silent())
    assert not (tmp_path / "new").exists()


def test_another_config_is_refused_with_the_differing_keys(finished):
    workdir = finished[0]
    with pytest.raises(UserError, match=r"another config(.|\n)*config.optim.lr: 0.002 -> 0.5"):
        run(workdir, optim__lr=0.5)
    with pytest.raises(UserError, match="holds a run already"):
        run(workdir, resume="never")


def test_must_resume_refuses_an_empty_folder(tmp_path):
    with pytest.raises(UserError, match="no checkpoint to resume"):
        run(tmp_path / "new", resume="must")


def test_a_workdir_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match=r"file.*choose another place"):
        run(tmp_path / "file" / "run")


def test_tests_are_due_by_steps_and_checkpoints_by_epochs(finished, tmp_path):
    checkpoints = dict(train__checkpoint_every_steps=0, train__checkpoint_every_epochs=2, train__checkpoint_keep=9)
    other = run(tmp_path / "run", eval__every_steps=4, eval__knn_every_epochs=1, **checkpoints)
    found = rows(tmp_path / "run")
    assert {row["step"] for row in found if "eval/online_probe_accuracy" in row} == {4, 6, 8, 12}
    assert {row["step"] for row in found if "eval/knn_accuracy" in row} == {6, 12}
    assert [path.name for path in (tmp_path / "run" / "checkpoints").glob("step_*")] == ["step_12"]
    assert other["params_sha256"] == finished[1]["params_sha256"]


@pytest.mark.slow
def test_another_seed_changes_the_result(finished, tmp_path):
    other = run(tmp_path / "run", train__seed=1)
    assert other["params_sha256"] != finished[1]["params_sha256"]


def test_a_diverging_run_stops_with_the_step_the_terms_and_the_last_good_checkpoint(tmp_path):
    settings = dict(optim__name="sgd", optim__lr=1e6, optim__warmup_lr=1e6, train__checkpoint_every_steps=1)
    with pytest.raises(
        Diverged, match=r"step \d+: the loss or its gradient is not finite .*invariance.*good checkpoint: step \d+"
    ):
        run(tmp_path / "run", **settings)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "diverged" and summary["steps"] < 12


def test_no_step_moves_data_between_host_and_device_unasked(tmp_path, monkeypatch):
    """The guard is really around the loop: a batch that is still on the host is refused."""
    wait_for = Steps.wait_for

    def on_host(self, batches, check):
        batch, info = wait_for(self, batches, check)
        return jax.device_get(batch), info

    monkeypatch.setattr(Steps, "wait_for", on_host)
    with pytest.raises(jax.errors.JaxRuntimeError, match="Disallowed host-to-device transfer"):
        run(tmp_path / "run")


def test_hooks_are_called_with_what_they_need(tmp_path, monkeypatch):
    calls = []

    def no_memory(*arguments):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 12345 bytes.")

    def explain(config, program, facts, console):
        return f"{config.data.batch_size} of {facts.num_train} images are too many"

    hooks = Hooks(
        explain_out_of_memory=explain,
        write_report=lambda folder: calls.append(folder),
    )
    config = tiny_config(mesh__data=1)
    with shared_programs():
        train(config, tmp_path / "a", console=Silent(), hooks=hooks)
        assert calls == [tmp_path / "a"]
        monkeypatch.setattr(Steps, "dispatch", no_memory)
        with pytest.raises(UserError, match="16 of 96 images are too many"):
            train(config, tmp_path / "b", console=Silent(), hooks=hooks)
        with pytest.raises(UserError, match="batch_size = 16: memory is used up; use a smaller batch"):
            train(config, tmp_path / "c", console=Silent())


class LineError(Evaluator):
    """Judges LineMethod: its mean squared error over the test split."""

    def due(self, moment):
        return moment.stage != Stage.UNTRAINED

    def run(self, state, moment):
        test, program = self.context.test, self.context.program
        model = program.factory.merge(state.params["model"], state.stats)
        batch = test.batch(np.arange(len(test)))
        loss = program.method.loss(model, None, batch, jax.random.key(0), state.step).loss
        return {"line_error": float(loss)}


class JudgedLineMethod(LineMethod):
    evaluators = (f"{__name__}:LineError",)


def test_inputs_that_are_not_images_are_trained_resumed_and_judged(tmp_path):
    console, name = Silent(), f"{__name__}:JudgedLineMethod"
    sequences = dict(method__name=name, data__source="tests.sequences:SequenceSource", log__pictures_every_epochs=1)
    whole = run(tmp_path / "whole", console, **sequences)
    assert "96 train and 32 test elements, no labels" in console.lines[4]
    assert whole["probe_accuracy"] is None and whole["lidar"] is None and whole["line_error"] > 0
    logged = [row["eval/line_error"] for row in rows(tmp_path / "whole") if "eval/line_error" in row]
    assert logged[-1] == whole["line_error"] < logged[0]

    def interrupt(text):
        if text.startswith("epoch 1"):
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted):
        run(tmp_path / "cut", Silent(interrupt), **sequences)
    assert run(tmp_path / "cut", **sequences)["params_sha256"] == whole["params_sha256"]


@pytest.mark.slow
def test_no_progress_bar_runs_ahead_of_its_work(tmp_path):
    class Bars(Silent):
        overrun = ()

        def start(self, what, total, done=0):
            self.what, self.left = what, math.inf if total is None else total - done

        def advance(self, amount=1, note=None):
            self.left -= amount
            if self.left < 0:
                self.overrun = (*self.overrun, self.what)

    bars = Bars()
    run(tmp_path / "run", bars, train__max_steps=7, **WHOLE)
    assert bars.overrun == ()


@pytest.mark.parametrize("channels", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_without_labels_everything_but_accuracies_is_measured(tmp_path, channels):
    console = Silent()
    summary = run(tmp_path / "run", console, eval__untrained=True, **unlabelled(tmp_path, channels))
    assert "no labels" in console.lines[4]
    missing = {"probe_accuracy", "untrained_probe_accuracy", "untrained_knn_accuracy", "knn_accuracy"}
    missing |= {"probe_held_out_accuracy", "untrained_probe_held_out_accuracy"}
    missing |= {
        "online_probe_accuracy",
        "probe_train_images",
        "probe_test_images",
        "collapse_warning",
        "chance_accuracy",
    }
    assert summary.keys() == SUMMARY_KEYS
    assert {name for name, value in summary.items() if value is None} == missing
    assert summary["effective_rank"] > 1 and summary["lidar"] > 1 and summary["num_classes"] == 0
    assert {row["step"] for row in rows(tmp_path / "run") if "collapse/relative_spread" in row} == {0, 6, 12}


@pytest.mark.slow
def test_an_encoder_that_ignores_remat_is_named(tmp_path):
    encoder, console = "tests.methods.test_user_method:MeanColour", Silent()
    run(tmp_path, console, model__name=encoder, train__remat="full", train__max_steps=2)
    expected = f"config.train.remat = full: {encoder} ignores it, so nothing is recomputed; use none"
    assert console.lines.count(expected) == 1
