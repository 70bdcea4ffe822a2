"""The best state by a figure of training or validation data: kept, evaluated, resumed from, and a reason to stop."""

import json
import math
import os
import signal
import types

import jax
import numpy as np
import pytest

from jepa_jax.base.errors import UserError
from jepa_jax.base.signals import Interrupted
from jepa_jax.data.sources import open_source
from jepa_jax.evals.evaluators import Evaluator, Stage
from jepa_jax.evals.inference import load_encoder, load_run
from jepa_jax.program.checkpoint import params_sha256
from jepa_jax.program.restore import restore_state
from jepa_jax.runtime.mesh import make_mesh
from jepa_jax.training.best import Choice, judge
from jepa_jax.training.progress import Loop, Progress
from tests.runs import KillNine, Silent, rows, run, unlabelled
from tests.sequence_methods import LineMethod
from tests.tiny import tiny_config

SCORES = (1.0, 3.0, 2.0, 3.0, 0.0)  # after epochs of 6 steps


class Scripted(Evaluator):
    """Offers scores that are known beforehand, and tells the weights that it was shown."""

    choosable = types.MappingProxyType({"score": "max"})

    def due(self, moment):
        return moment.stage != Stage.UNTRAINED

    def run(self, state, moment):
        weights = {"weight": float(np.sum(jax.device_get(state.params["model"]["kernel"])))}
        return weights | ({"score": SCORES[moment.epoch - 1]} if moment.stage == Stage.EPOCH else {})


class Breaking(Evaluator):
    """Ends the process's run after an epoch, before its checkpoint, as `kill -9` would."""

    breaks_after = 0

    def due(self, moment):
        return moment.stage == Stage.EPOCH

    def run(self, state, moment):
        if moment.epoch == Breaking.breaks_after:
            raise KillNine
        return {"epochs_seen": float(moment.epoch)}


class ScriptedMethod(LineMethod):
    evaluators = (f"{__name__}:Scripted", f"{__name__}:Breaking")


SEQUENCES = dict(
    method__name=f"{__name__}:ScriptedMethod", data__source="tests.sequences:SequenceSource",
    optim__epochs=5.0,
)  # fmt: skip
BEST = dict(train__keep_best="score", train__checkpoint_every_steps=1000)  # no checkpoint but the best one


def final(summary):
    names = ("status", "steps", "weight", "params_sha256", "best_score", "best_step", "best_epoch", "stopped_early")
    return {name: summary[name] for name in names}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of all epochs, the best of which is the second one."""
    workdir = tmp_path_factory.mktemp("best") / "whole"
    return workdir, run(workdir, **SEQUENCES, **BEST)


def test_the_first_of_equally_good_states_is_kept_and_evaluated(whole):
    workdir, summary = whole
    assert (summary["best_score"], summary["best_step"], summary["best_epoch"], summary["steps"]) == (3.0, 12, 2, 30)
    assert summary["status"] == "finished" and not summary["stopped_early"] and "reason" not in summary
    weights = [row["eval/weight"] for row in rows(workdir) if "eval/weight" in row]
    assert summary["weight"] == weights[1] and len(set(weights[:5])) == 5
    assert [path.name for path in (workdir / "best").glob("step_*")] == ["step_12"]


def test_what_reads_a_run_reads_its_best_state(whole):
    workdir, summary = whole
    config = tiny_config(mesh__data=1, **SEQUENCES, **BEST)
    _, state = restore_state(config, workdir, make_mesh(1, 1), open_source(config.data, "train").spec)
    assert int(state.step) == 12 and params_sha256(state.params["model"]) == summary["params_sha256"]


# "epochs seen 2" is said after the best epoch was judged: both folders then hold a checkpoint of its step.
@pytest.mark.parametrize(
    "way",
    ["killed", *(pytest.param(way, marks=pytest.mark.slow) for way in ("epochs seen 2", "epoch 3/5", "epoch 5/5"))],
)
def test_a_run_that_is_cut_off_chooses_as_if_nothing_had_happened(whole, tmp_path, monkeypatch, way):
    def interrupt(text):
        if way in text:
            os.kill(os.getpid(), signal.SIGTERM)

    if way == "killed":
        monkeypatch.setattr(Breaking, "breaks_after", 2)  # the best state is on disk, and nothing else
        with pytest.raises(KillNine):
            run(tmp_path, **SEQUENCES, **BEST)
        assert not list((tmp_path / "checkpoints").glob("step_*"))
        monkeypatch.undo()
    else:
        with pytest.raises(Interrupted):
            run(tmp_path, Silent(interrupt), **SEQUENCES, **BEST)
    if way == "epochs seen 2":
        assert (tmp_path / "best" / "step_12").is_dir() and (tmp_path / "checkpoints" / "step_12").is_dir()
    console = Silent()
    summary = run(tmp_path, console, **SEQUENCES, **BEST)
    assert final(summary) == final(whole[1])
    for name in ("eval/score", "eval/epochs_seen", "train/loss"):
        steps = [row["step"] for row in rows(tmp_path) if name in row]
        assert steps == [row["step"] for row in rows(whole[0]) if name in row]
    if way == "killed":
        assert any(line.startswith("resumed at step 12") for line in console.lines)


def test_patience_ends_a_run_that_says_so_and_is_finished(whole, tmp_path):
    console, patient = Silent(), dict(train__patience=2)
    summary = run(tmp_path, console, **SEQUENCES, **BEST, **patient)
    assert final(summary) == final(whole[1]) | {"steps": 24, "stopped_early": True}
    reason = "stopped early: score has not improved in 2 evaluations"
    assert summary["reason"] == reason and f"step 24: {reason}" in console.lines
    again = Silent()
    assert run(tmp_path, again, **SEQUENCES, **BEST, **patient) == json.loads((tmp_path / "summary.json").read_text())
    (line,) = again.lines
    assert line.startswith(f"{tmp_path}: finished already; nothing to do")


def test_a_run_that_ends_within_its_first_epoch_chooses_nothing_and_evaluates_its_last_state(tmp_path):
    summary = run(tmp_path, **SEQUENCES, **BEST, train__max_steps=4, train__patience=2)
    assert (summary["status"], summary["steps"], summary["stopped_early"]) == ("finished", 4, False)
    assert [summary[f"best_{name}"] for name in ("score", "step", "epoch")] == [None, None, None]
    config = tiny_config(mesh__data=1, **SEQUENCES, **BEST)
    _, state = restore_state(config, tmp_path, make_mesh(1, 1), open_source(config.data, "train").spec)
    assert int(state.step) == 4 and params_sha256(state.params["model"]) == summary["params_sha256"]
    assert summary["weight"] == float(np.sum(jax.device_get(state.params["model"]["kernel"])))


@pytest.mark.parametrize(
    "best, values, min_delta, chosen, stops",
    [
        ("max", (1, 2, 2, 2, 9), 0.0, 2, 4),  # ties do not count
        ("min", (3, 2, 1, 1, 1), 0.0, 3, 5),
        ("max", (1.0, 1.3, 1.6, 1.9, 2.2), 0.5, 5, None),  # small steps count once they add up
        ("max", (1.0, 1.5, 1.25, 9, 9), 0.5, 2, 3),  # exactly min_delta is too little, but it is better
        ("max", (None, math.nan, 1, 1, 1), 0.0, None, 2),
        ("min", (math.inf, 2, math.nan, 1, 1), 0.0, 4, None),
    ],
)
def test_which_evaluation_is_best_and_which_one_ends_the_run(best, values, min_delta, chosen, stops):
    config = tiny_config(train__keep_best="score", train__patience=2, train__min_delta=min_delta).train
    loop = Loop(0, None, Progress())
    for loop.step, value in enumerate(values, start=1):
        judge(config, Choice("scripted", "score", best == "max"), loop, value, loop.step)
        if loop.progress.stopped:
            break
    assert (loop.step if loop.progress.stopped else None) == stops
    assert (loop.progress.best or {}).get("step") == chosen


@pytest.mark.parametrize(
    "overrides, message",
    [
        (
            dict(train__keep_best="weight", **SEQUENCES),
            r"keep_best = 'weight': .*excludes .*test split; choose from: score",
        ),
        (dict(train__keep_best="probe_accuracy"), "choose from: probe_held_out_accuracy"),
        (dict(train__keep_best="x", data__validation=0.1), "probe_held_out_accuracy, validation_loss"),
        (dict(train__keep_best="probe_held_out_accuracy", eval__every_epochs=3), r"after no epoch of this run.*\(2\)"),
        (dict(train__keep_best="x", train__max_steps=2), "choose from: probe_held_out_accuracy"),
        (dict(train__patience=2), r"config.train.patience = 2: needs train.keep_best"),
    ],
)
def test_what_cannot_choose_is_refused_before_anything_is_compiled(tmp_path, overrides, message):
    with pytest.raises(UserError, match=message):
        run(tmp_path / "run", **overrides)
    assert not (tmp_path / "run").exists()


def test_without_labels_and_validation_nothing_can_choose(tmp_path):
    with pytest.raises(UserError, match="choose from: none: hold something out with data.validation"):
        run(tmp_path / "run", train__keep_best="probe_held_out_accuracy", **unlabelled(tmp_path))


@pytest.mark.slow
def test_the_probe_on_held_out_training_images_chooses(tmp_path):
    summary = run(tmp_path, train__keep_best="probe_held_out_accuracy", optim__epochs=3.0)
    logged = {r["step"]: r["eval/probe_held_out_accuracy"] for r in rows(tmp_path) if "eval/online_probe_accuracy" in r}
    best = summary["best_probe_held_out_accuracy"]
    assert best == max(logged.values()) and summary["best_step"] == min(s for s in logged if logged[s] == best)
    assert summary["probe_held_out_accuracy"] == best  # the final evaluation is of that state
    assert params_sha256(load_run(tmp_path).encoder.params) == summary["params_sha256"]
    images = np.random.default_rng(0).integers(0, 256, (3, 16, 16, 3), np.uint8)
    assert load_encoder(tmp_path)(images).shape == (3, 16)


def test_the_loss_of_what_is_held_out_chooses(tmp_path):
    overrides = dict(data__validation=0.25, train__keep_best="validation_loss", optim__lr=3.0, optim__epochs=4.0)
    summary = run(tmp_path, **SEQUENCES | overrides)
    logged = {row["step"]: row["eval/validation_loss"] for row in rows(tmp_path) if "eval/validation_loss" in row}
    assert list(logged) == [4, 8, 12, 16]  # 72 of 96 elements are trained on
    assert summary["best_validation_loss"] == min(list(logged.values())) == summary["validation_loss"]
    config = tiny_config(mesh__data=1, **SEQUENCES | overrides)
    source = open_source(config.data, "validation")
    _, state = restore_state(config, tmp_path, make_mesh(1, 1), source.spec)
    batch, model = source.batch(np.arange(24)), jax.device_get(state.params["model"])
    errors = batch["frames"] @ model["kernel"] + model["bias"] - batch["length"][:, None, None, None]
    per_element = np.mean(np.square(errors), axis=(1, 2, 3))
    filled = np.append(per_element[16:], per_element[:8])  # the last batch of 16 wraps round and counts half
    assert summary["validation_loss"] == pytest.approx(
        (16 * per_element[:16].mean() + 8 * filled.mean()) / 24, rel=1e-5
    )
