"""A method outside the package in every tool: trained, interrupted and resumed, evaluated, profiled and planned."""

import io
import json
import os
import pathlib
import signal
import sys

import jax
import numpy as np
import pytest

from jepa_jax.base.classes import trust_files
from jepa_jax.base.console import Console
from jepa_jax.base.signals import Interrupted
from jepa_jax.data.facts import data_facts
from jepa_jax.evals.evaluate import evaluate
from jepa_jax.evals.inference import load_run
from jepa_jax.planning.estimate import FITS
from jepa_jax.planning.planner import Planner
from jepa_jax.planning.step_compiler import Request, StepCompiler
from jepa_jax.program.restore import restore_state
from jepa_jax.runtime.mesh import make_mesh
from jepa_jax.training.run import train
from tests.planning.line_compiler import TABLE, planned
from tests.runs import Silent, rows
from tests.tiny import tiny_config

FIXTURES = pathlib.Path(__file__).parents[1] / "fixtures"


@pytest.fixture(scope="module", autouse=True)
def _on_the_path():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FIXTURES))
        yield


def small_config(method="Byol", **overrides):
    settings = dict(
        method__name=f"byol:{method}", method__projector=(16, 8), method__predictor=16, mesh__data=1,
        eval__weights="target" if method == "Byol" else "online",
    )  # fmt: skip
    return tiny_config(**settings | overrides)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """An uninterrupted run: 12 steps, two epochs."""
    workdir = tmp_path_factory.mktemp("byol") / "whole"
    return workdir, train(small_config(profile__enabled=True), workdir, console=Silent())


def interrupt_after_first_epoch(text):
    if text.startswith("epoch 1/2"):
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.slow
def test_a_run_that_was_interrupted_ends_bit_for_bit_like_one_that_was_not(finished, tmp_path):
    workdir, summary = finished
    assert summary["status"] == "finished" and summary["steps"] == 12 and summary["compilations"] == 1
    with pytest.raises(Interrupted):
        train(small_config(), tmp_path, console=Silent(interrupt_after_first_epoch))
    stopped = json.loads((tmp_path / "summary.json").read_text())
    assert (stopped["status"], stopped["steps"]) == ("interrupted", 6)
    resumed = train(small_config(), tmp_path, resume="must", console=Silent())
    same = ("status", "steps", "params_sha256", "probe_accuracy", "knn_accuracy", "effective_rank", "lidar")
    assert [resumed[name] for name in same] == [summary[name] for name in same]
    states = [restore_state(small_config(), folder, make_mesh(1, 1))[1] for folder in (workdir, tmp_path)]
    jax.tree.map(np.testing.assert_array_equal, *states)  # the slow copy and its statistics, too
    losses = [[row["train/loss"] for row in rows(folder) if "train/loss" in row] for folder in (workdir, tmp_path)]
    assert losses[0] == losses[1] and len(losses[0]) == 12


@pytest.mark.slow
def test_the_slow_copy_is_evaluated_with_its_own_statistics(finished):
    workdir, summary = finished
    with trust_files():  # whose config.json names byol:Byol
        found = evaluate(workdir, protocols="linear_probe,knn,feature_quality", console=Console(io.StringIO()))
        encoder = load_run(workdir).encoder
    assert (found.record["method"], found.record["weights"]) == ("byol:Byol", "target")
    results = found.record["levels"]["0"]
    assert results["linear_probe"]["accuracy"] == summary["probe_accuracy"]
    assert 1 <= results["feature_quality"]["effective_rank"] <= 16
    _, state = restore_state(small_config(), workdir, make_mesh(1, 1))
    jax.tree.map(np.testing.assert_array_equal, encoder.params["encoder"], state.target["encoder"])
    slow, online = state.target_stats["encoder"]["stem_norm"], state.stats["encoder"]["stem_norm"]
    np.testing.assert_allclose(encoder.stats["encoder"]["stem_norm"]["mean"], slow["mean"], rtol=1e-4, atol=1e-5)
    assert np.abs(slow["mean"] - online["mean"]).max() > 1e-2
    assert found.record["params_sha256"] != summary["params_sha256"]  # of the trained weights


@pytest.mark.slow
def test_it_is_profiled(finished):
    profile = json.loads((finished[0] / "profile.json").read_text())
    assert [epoch["steps"] for epoch in profile["epochs"]] == [6, 6]
    assert all(epoch["seconds"] > 0 for epoch in profile["epochs"])


def test_it_is_planned():
    """The step of the method can be lowered without data; the plan itself is that of a compiler for tests."""
    plan = planned(small_config(mesh__data=-1))
    assert plan.estimate.verdict == FITS and plan.largest[0][1].batch_size >= 16


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the wheels of the compiler are for Linux")
def test_it_is_compiled_for_an_absent_gpu():
    config = small_config(mesh__data=-1)
    compiler = StepCompiler(data_facts(config.data, assume=True), None)
    plan = Planner(compiler, TABLE).plan(Request(config, TABLE["rtx4090"]), variants=False)
    assert plan.estimate.verdict == FITS and plan.estimate.facts.target_bytes > 0


@pytest.mark.slow
def test_simsiam_trains_too(tmp_path):
    config = small_config("SimSiam", optim__epochs=1.0)
    summary = train(config, tmp_path, console=Silent())
    assert summary["status"] == "finished" and summary["steps"] == 6 and 0 <= summary["probe_accuracy"] <= 100
    _, state = restore_state(config, tmp_path, make_mesh(1, 1))
    assert not state.target and not state.target_stats
