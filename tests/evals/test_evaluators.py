"""Evaluators: those that a method names, figures with and without labels, and whose batch statistics they read."""

import dataclasses
import json
import math
import pathlib

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jepa_jax.base.errors import UserError
from jepa_jax.data.sources import open_splits
from jepa_jax.evals.classification import Classification
from jepa_jax.evals.evaluators import EvaluationContext, Evaluator, Moment, Stage, build_evaluators, checked_figures
from jepa_jax.evals.feature_quality import CollapseWatch
from jepa_jax.methods.contract import Output
from jepa_jax.methods.image_method import EncoderWith, ImageMethod
from jepa_jax.program.step import with_evaluated_statistics
from jepa_jax.training.saver import Saver
from tests.runs import Silent, one_class, rows, run, unlabelled
from tests.stepping import build_program
from tests.tiny import tiny_config, tiny_masked_config

UNTRAINED, FIRST, LAST = Moment(Stage.UNTRAINED, 0, 0), Moment(Stage.EPOCH, 6, 1), Moment(Stage.FINAL, 12, 2)
NEEDS_LABELS = {
    "probe_accuracy", "probe_held_out_accuracy", "knn_accuracy", "online_probe_accuracy", "probe_train_images",
    "probe_test_images", "chance_accuracy",
}  # fmt: skip


def context_of(config):
    """Returns the context of an untrained program, and its state."""
    sources = open_splits(config.data)
    sample = sources[0].batch(np.arange(config.data.batch_size))
    program = build_program(config, batch=sample)
    return EvaluationContext(config, program, sources), program.factory.create(0, sample)


@pytest.mark.parametrize(("config", "normalised"), [(tiny_config(), False), (tiny_masked_config("ijepa"), True)])
def test_features_before_the_last_norm_are_computed_only_where_there_is_one(config, normalised):
    context, state = context_of(config)
    encoder = context.encoder(state, 0)
    assert encoder.normalises(encoder.test) == normalised
    apart = encoder.raw_features(0, 10).features  # computed before any other features are known
    known = encoder.with_weights(encoder.params, encoder.stats)
    known.test_features()
    counted = []
    beside = known.raw_features(0, 10, counted.append).features
    np.testing.assert_allclose(beside, apart, rtol=1e-5, atol=1e-6)
    assert (list(known.store.known) == ["level0_test"]) == (not normalised)
    assert sum(counted) == 10


def test_context_and_target_are_measured_apart():
    context, state = context_of(tiny_masked_config("hjepa"))
    evaluator = build_evaluators(context)["context_and_target"]
    larger = jax.tree.map(lambda leaf: 2 * leaf, state.params["model"])
    figures = evaluator.run(dataclasses.replace(state, params=state.params | {"model": larger}), FIRST)
    watch = build_evaluators(context)["collapse"].run(state, FIRST)
    assert [evaluator.due(moment) for moment in (UNTRAINED, FIRST, LAST)] == [False, True, False]
    assert figures["target_std"] == pytest.approx(watch["std_mean"])  # eval.weights = target
    assert figures["context_std"] > 1.5 * figures["target_std"]


class Weighted(ImageMethod):
    """A user's method whose features differ from those before its last norm by constants alone."""

    evaluators = ("collapse",)

    def init(self, key, sample):
        return EncoderWith(self.encoder(sample, nnx.Rngs(params=key)))

    def loss(self, model, target, batch, key, step):
        features = self.features(model, batch, train=True)
        return Output(jnp.mean(jnp.square(features - 1)), {}, features)

    def features(self, model, batch, *, level=0, normalised=True, train=False):
        features = super().features(model, batch, train=train)
        width = features.shape[-1]
        return features * (np.linspace(0, 1, width) if normalised else np.ones(width))


def test_features_that_differ_by_constants_are_told_apart():
    context, state = context_of(tiny_config(method__name=f"{__name__}:Weighted"))
    encoder = context.encoder(state, 0)
    assert encoder.normalises(encoder.test)
    whole = encoder.test_features().features
    raw = encoder.raw_features(0, len(whole)).features
    np.testing.assert_allclose(whole, raw * np.linspace(0, 1, raw.shape[-1]), rtol=1e-5, atol=1e-6)


class MeanLength(Evaluator):
    """A user's evaluator: the mean length of features, after every second epoch and at the end."""

    group = "lengths"

    def due(self, moment):
        return moment.stage == Stage.FINAL or moment.ends(2)

    def run(self, state, moment):
        features = self.context.encoder(state, 0).test_features().features
        return {"mean_length": float(np.mean(np.linalg.norm(features, axis=1))), "not_measured": None}


class Quiet(ImageMethod):
    """Judged by an evaluator of the user's own and by one of this package; its model has dropout and a counter."""

    evaluators = ("collapse", f"{__name__}:MeanLength")

    def init(self, key, sample):
        rngs = nnx.Rngs(params=key, dropout=jax.random.fold_in(key, 1))
        return Model(self.encoder(sample, rngs), rngs)

    def loss(self, model, target, batch, key, step):
        features = self.features(model, batch, train=True)
        return Output(jnp.mean(jnp.square(features - 1)), {}, features)

    def features(self, model, batch, *, level=0, normalised=True, train=False):
        features = super().features(model, batch, train=train)
        model.calls[...] += 1
        return model.dropout(features, deterministic=not train)


class Model(nnx.Module):
    def __init__(self, encoder, rngs):
        self.encoder, self.dropout = encoder, nnx.Dropout(0.5, rngs=rngs)
        self.calls = nnx.Variable(jnp.full([], 3, jnp.int32))  # neither trained nor a batch statistic


class Misspelled(Quiet):
    evaluators = ("colapse",)


QUIET = f"{__name__}:Quiet"


def test_a_method_is_judged_by_the_evaluators_that_it_names():
    context, _ = context_of(tiny_config())
    assert {name: type(one) for name, one in build_evaluators(context).items()} == {
        "classification": Classification,
        "collapse": CollapseWatch,
    }
    context, state = context_of(tiny_config(method__name=QUIET))
    evaluators = build_evaluators(context)
    assert list(evaluators) == ["collapse", f"{__name__}:MeanLength"]
    own = evaluators[f"{__name__}:MeanLength"]
    assert [own.due(moment) for moment in (UNTRAINED, FIRST, Moment(Stage.EPOCH, 12, 2), LAST)] == [0, 0, 1, 1]
    assert own.run(state, LAST)["mean_length"] > 0
    context, _ = context_of(tiny_config(method__name=f"{__name__}:Misspelled"))
    with pytest.raises(UserError, match="method.evaluators = 'colapse'.*classification, collapse.*mean collapse?"):
        build_evaluators(context)


def test_figures_that_were_not_measured_are_left_out_of_the_words():
    context, _ = context_of(tiny_config(method__name=QUIET))
    figures = {"mean_length": 2.0, "not_measured": None}
    assert build_evaluators(context)[f"{__name__}:MeanLength"].in_words(figures) == "mean length 2"


def test_a_run_logs_the_figures_of_a_users_evaluator(tmp_path):
    summary = run(tmp_path, method__name=QUIET)
    logged = {row["step"]: row["lengths/mean_length"] for row in rows(tmp_path) if "lengths/mean_length" in row}
    assert set(logged) == {12} and summary["mean_length"] == pytest.approx(logged[12], rel=1e-6)
    assert summary["not_measured"] is None
    assert summary["probe_accuracy"] is None and summary["effective_rank"] >= 1  # judged without classification


class Fragile(Evaluator):
    """A user's evaluator that fails after the third epoch, and returns numbers of every kind otherwise."""

    group = "fragile"

    def due(self, moment):
        return moment.stage != Stage.UNTRAINED

    def run(self, state, moment):
        if moment.stage == Stage.EPOCH and moment.epoch == 3:
            raise RuntimeError("too hot")
        return {"numpy": np.float32(0.5), "jax": jnp.asarray(2), "flag": np.bool_(True), "python": moment.epoch}


class FragileMethod(Quiet):
    evaluators = ("collapse", f"{__name__}:Fragile")


def test_a_failing_evaluator_does_not_end_a_run(tmp_path, monkeypatch):
    name, events, save = f"{__name__}:Fragile", [], Saver.save
    monkeypatch.setattr(Saver, "save", lambda saver, loop: (events.append(loop.step), save(saver, loop)))
    console = Silent(lambda text: events.append("failed") if "failed" in text else None)
    options = dict(method__name=f"{__name__}:FragileMethod", optim__epochs=5.0)
    summary = run(tmp_path, console, train__checkpoint_every_steps=100, **options)
    assert summary["status"] == "finished" and summary["steps"] == 30
    (reason,) = (summary["failed_evaluators"].pop(name), *summary["failed_evaluators"].values())
    assert reason.startswith("step 18: RuntimeError: too hot (test_evaluators.py, line ")
    assert events == [18, "failed", 30]  # saved first
    assert [line for line in console.lines if "failed" in line][0].startswith(f"step 18: the evaluator {name} failed")
    logged = {row["step"]: row["fragile/python"] for row in rows(tmp_path) if "fragile/python" in row}
    assert logged == {6: 1, 12: 2, 24: 4, 30: 5}
    assert [summary[key] for key in ("numpy", "jax", "flag", "python")] == [0.5, 2, True, 5]
    assert json.loads((tmp_path / "summary.json").read_text())["flag"] is True


@pytest.mark.parametrize("value", [np.zeros(3), jnp.zeros((1,)), "text", [1.0], 1j, object()])
def test_figures_that_are_no_numbers_are_refused_by_name(value):
    with pytest.raises(TypeError, match="evaluator mine: spread is .*; a figure is a number or None"):
        checked_figures("mine", {"rank": 1, "spread": value}, final=False)
    with pytest.raises(TypeError, match="evaluator mine: run returned NoneType"):
        checked_figures("mine", None, final=False)
    assert checked_figures("mine", {"fires": ({"id": "a", "area": np.float64(2)},)}, final=True) == {
        "fires": [{"id": "a", "area": 2.0}]
    }


def test_an_evaluator_without_run_is_refused_before_training():
    class Idle(Evaluator):
        def due(self, moment):
            return True

    context, _ = context_of(tiny_config(method__name=QUIET))
    context.program.method.evaluators = ("idle",)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jepa_jax.evals.evaluators.find_class", lambda *_: Idle)
        with pytest.raises(UserError, match="method.evaluators = 'idle': has no run; inherit from"):
            build_evaluators(context)


def test_the_example_of_the_docs_runs_as_an_outside_file(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(pathlib.Path(__file__).parents[2] / "docs" / "examples"))
    summary = run(tmp_path, method__name="evaluator:WatchedJepa")
    logged = [row["sphere/uniformity"] for row in rows(tmp_path) if "sphere/uniformity" in row]
    assert len(logged) == 3 and summary["uniformity"] == pytest.approx(logged[-1])  # two epochs, and the end
    assert -8 <= summary["uniformity"] < 0 < summary["alignment"] <= 4  # squared distances lie in 0..4
    assert summary["failed_evaluators"] == {} and summary["probe_accuracy"] is not None


def test_without_labels_accuracies_are_none_and_spread_is_measured(tmp_path):
    context, state = context_of(tiny_config(**unlabelled(tmp_path)))
    evaluators = build_evaluators(context)
    classification, collapse = evaluators["classification"], evaluators["collapse"]
    assert [classification.due(moment) for moment in (UNTRAINED, FIRST, LAST)] == [False, False, True]
    figures = classification.run(state, LAST)
    assert figures == dict.fromkeys(NEEDS_LABELS) | {"feature_dim": 16}
    assert [collapse.due(moment) for moment in (UNTRAINED, FIRST, LAST)] == [True, True, True]
    assert collapse.warning(collapse.run(state, FIRST), None) is None
    final = collapse.run(state, LAST)
    assert 1 <= final["effective_rank"] <= 16 and 1 <= final["lidar"] <= 16


def test_with_one_class_no_accuracy_is_measured(tmp_path):
    context, state = context_of(tiny_config(**one_class(tmp_path)))
    classification = build_evaluators(context)["classification"]
    assert classification.run(state, LAST) == dict.fromkeys(NEEDS_LABELS) | {"feature_dim": 16}
    assert classification.run(state, UNTRAINED) == classification.run(state, FIRST) == {}
    assert classification.in_words({}) == "all images are of one class: no accuracy is measured"


def test_with_labels_nothing_is_none():
    context, state = context_of(tiny_config())
    classification = build_evaluators(context)["classification"]
    figures = classification.run(state, LAST)
    assert figures.keys() == NEEDS_LABELS | {"feature_dim"} and None not in figures.values()
    assert (figures["probe_train_images"], figures["probe_test_images"]) == (96, 32)
    assert set(classification.run(state, FIRST)) <= {"online_probe_accuracy", "knn_accuracy"}


def test_chance_in_a_summary_is_that_of_the_commonest_class(tmp_path):
    overrides = one_class(tmp_path)
    with np.load(tmp_path / "data.npz") as stored:
        arrays = dict(stored)
    for name in ("y_train", "y_test"):
        arrays[name][::4] = 1
    np.savez(tmp_path / "data.npz", **arrays)
    context, state = context_of(tiny_config(**overrides))
    assert build_evaluators(context)["classification"].run(state, LAST)["chance_accuracy"] == 75


def test_the_held_out_accuracy_is_that_of_training_images():
    context, state = context_of(tiny_config())
    classification = build_evaluators(context)["classification"]
    untrained, final = classification.run(state, UNTRAINED), classification.run(state, LAST)
    # A tenth of 96 images is 10 images: a multiple of 10 %, which 32 test images give for 0, 50 and 100 % alone.
    for share in (untrained["untrained_probe_held_out_accuracy"], final["probe_held_out_accuracy"]):
        assert share % 10 == pytest.approx(0, abs=1e-9)
    assert classification.in_words(untrained).count("%") == 2  # the terminal shows probe and k-NN


def test_lidar_needs_random_views():
    still = {f"data__augment__{name}__probability": 0.0 for name in ("crop", "flip", "jitter", "grayscale", "solarize")}
    context, state = context_of(tiny_config(**still))
    final = build_evaluators(context)["collapse"].run(state, LAST)
    assert final["lidar"] is None and math.isfinite(final["effective_rank"])


def test_calibration_averages_batch_statistics_and_nothing_else():
    context, state = context_of(tiny_config(method__name=QUIET))
    stats = context.encoder(state, 96).stats
    assert jax.tree.structure(stats) == jax.tree.structure(state.stats)
    assert stats["calls"] == 3 and "dropout" not in stats
    np.testing.assert_array_equal(stats["encoder"]["filters"], state.stats["encoder"]["filters"])
    # Three batches of 32 images: the mean of their means is the mean over all of them.
    whole, _ = context_of(tiny_config(method__name=QUIET, eval__batch_size=96))
    at_once = whole.encoder(state, 96).stats
    norm, norm_at_once = (tree["encoder"]["stem_norm"] for tree in (stats, at_once))
    np.testing.assert_allclose(norm["mean"], norm_at_once["mean"], rtol=1e-4, atol=1e-5)
    # The variance between their means is part of the variance over all of them.
    np.testing.assert_allclose(norm["var"], norm_at_once["var"], rtol=1e-4)
    assert np.abs(norm["mean"] - state.stats["encoder"]["stem_norm"]["mean"]).max() > 1e-3
    assert context.encoder(state, 0).stats is state.stats


def test_batch_statistics_of_heads_alone_are_not_calibrated_and_no_image_is_read_twice():
    context, state = context_of(tiny_config(model__name="vit", model__width=16, model__depth=1, model__heads=2))
    assert state.stats["projector"] and context.encoder(state, 96).stats is state.stats
    context, state = context_of(tiny_config(method__name=QUIET))
    assert context.encoder(state, 1024).stats["calls"] == 3  # of 32 of the 96 images


def test_the_statistics_of_the_target_are_calibrated_and_kept_apart(byol):
    context, state = context_of(tiny_config(**byol, eval__weights="target"))
    state = dataclasses.replace(
        state,
        target=jax.tree.map(lambda leaf: leaf * 1.1, state.target),
        target_stats=jax.tree.map(lambda leaf: leaf + 1, state.target_stats),
    )
    encoder = context.encoder(state, 0)
    jax.tree.map(np.testing.assert_array_equal, encoder.stats["projector"], state.target_stats["projector"])
    jax.tree.map(np.testing.assert_array_equal, encoder.params["encoder"], state.target["encoder"])
    kept = with_evaluated_statistics(state, "target", context.evaluated_statistics(state))
    jax.tree.map(np.testing.assert_array_equal, kept.stats, state.stats)
    assert set(kept.target_stats) == set(state.target_stats)
    slow = kept.target_stats["encoder"]["stem_norm"]["mean"]
    assert np.abs(slow - state.target_stats["encoder"]["stem_norm"]["mean"]).max() > 0.1
    # They are statistics of the target's weights, not of the online network's.
    online, _ = context_of(tiny_config(**byol, eval__weights="online"))
    other = with_evaluated_statistics(state, "online", online.evaluated_statistics(state))
    jax.tree.map(np.testing.assert_array_equal, other.target_stats, state.target_stats)
    last = kept.target_stats["encoder"]["layers"], other.stats["encoder"]["layers"]
    differences = jax.tree.leaves(jax.tree.map(lambda a, b: float(np.abs(a - b).max()), *last))
    assert max(differences) > 1e-3
