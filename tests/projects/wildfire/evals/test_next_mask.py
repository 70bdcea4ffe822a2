"""The evaluator of the next mask: what it measures when, what it chooses by, and what it tells."""

import json
import sys

import numpy as np
import pytest
import scipy.special
import sklearn.metrics

from jepa_jax.base.errors import UserError
from jepa_jax.data.contract import fixed_order
from jepa_jax.data.sources import open_data
from jepa_jax.evals.evaluators import EvaluationContext, Moment, Stage, build_evaluators
from jepa_jax.projects.wildfire.evals import next_mask
from jepa_jax.projects.wildfire.evals.baselines import BASELINES
from jepa_jax.projects.wildfire.evals.next_mask import NextMask
from jepa_jax.training.run import train
from tests.projects.wildfire.evals.pixel_method import context_of, fire_config
from tests.runs import Silent, rows
from tests.tiny import tiny_config

UNTRAINED, FIRST, LAST = Moment(Stage.UNTRAINED, 0, 0), Moment(Stage.EPOCH, 6, 1), Moment(Stage.FINAL, 12, 2)
AT_A_THRESHOLD = {"average_precision", "new_average_precision", "precision", "recall", "f1", "iou"}


class Relabelled:
    """A source with other truth, which keeps its buckets."""

    def __init__(self, source, change):
        self._source, self._change, self.spec, self.classes = source, change, source.spec, ()

    def __len__(self):
        return len(self._source)

    @property
    def buckets(self):
        return self._source.buckets

    def in_bucket(self, bucket):
        return Relabelled(self._source.in_bucket(bucket), self._change)

    def batch(self, indices):
        batch = self._source.batch(indices)
        return {**batch, **self._change(batch)}


@pytest.fixture(scope="module")
def built():
    """The context of an untrained model, its state, its evaluator and the final figures."""
    context, state = context_of(fire_config())
    evaluator = build_evaluators(context)["next_mask"]
    return context, state, evaluator, evaluator.run(state, LAST)


def with_sources(built, test, validation):
    """Returns the evaluator of the same program on other data."""
    context, *_ = built
    sources = (context.train, test)
    return NextMask(EvaluationContext(context.config, context.program, sources, validation=validation))


def scores_of(built, source):
    context, state, evaluator, _ = built
    encoder = context.encoder(state, 0)
    return evaluator.predictor.with_weights(encoder.params, encoder.stats).scores(source)


def truth_of(source):
    batch = source.batch(np.arange(len(source)))
    return batch["target"][..., 0], ~batch["fire"][:, -1, ..., 0]


def test_final_figures_are_those_of_scikit_learn_over_the_whole_test_split(built):
    context, _, _, figures = built
    scores, (target, new) = scores_of(built, context.test), truth_of(context.test)
    expected = sklearn.metrics.average_precision_score
    assert figures["average_precision"] == pytest.approx(expected(target.ravel(), scores.ravel()))
    assert figures["new_average_precision"] == pytest.approx(expected(target[new], scores[new]))
    predicted = scores >= scipy.special.logit(figures["threshold"]) - 1e-6
    assert figures["f1"] == pytest.approx(sklearn.metrics.f1_score(target.ravel(), predicted.ravel()))
    assert figures["iou"] == pytest.approx(sklearn.metrics.jaccard_score(target.ravel(), predicted.ravel()))
    low, high = figures["new_average_precision_interval_95"]
    assert low < figures["new_average_precision"] < high


def test_final_figures_have_baselines_shuffled_wind_and_spread_beside_them(built):
    *_, figures = built
    for name in BASELINES:
        assert {f"{name}_{figure}" for figure in AT_A_THRESHOLD} <= figures.keys()
    best = max(figures[f"{name}_new_average_precision"] for name in BASELINES)
    assert figures["baseline_new_average_precision"] == best
    assert figures["new_average_precision_gain"] == pytest.approx(figures["new_average_precision"] - best)
    low, high = figures["new_average_precision_gain_interval_95"]
    assert low < figures["new_average_precision_gain"] < high
    assert figures["shuffled_wind_average_precision"] != figures["average_precision"]
    assert len(figures["worst_fires"]) == 5 and figures["test_fires"] == 6
    assert json.loads(json.dumps(figures)) == figures
    assert None not in figures.values()
    shares = [value for value in figures.values() if isinstance(value, float)]
    assert all(-1 <= value <= 1 for value in shares) and len(shares) > 30


def test_persistence_keeps_its_mask_at_the_threshold(built):
    context, _, _, figures = built
    batch = context.test.batch(np.arange(24))
    kept, target = batch["fire"][:, -1].ravel(), batch["target"].ravel()
    assert figures["persistence_iou"] == pytest.approx(sklearn.metrics.jaccard_score(target, kept))
    assert figures["persistence_precision"] == 1  # what burns stays in the mask


def test_the_threshold_is_chosen_on_validation_data_even_where_test_data_disagree(built):
    context, state, evaluator, figures = built
    validation = scores_of(built, context.validation)
    target, _ = truth_of(context.validation)
    tried = [validation >= threshold for threshold in np.unique(validation)]
    f1 = max(2 * np.sum(mask & target) / (np.sum(mask) + np.sum(target)) for mask in tried)
    assert figures["validation_f1"] == pytest.approx(f1)
    # All test pixels burn: the best threshold there would be below every score.
    burning = Relabelled(context.test, lambda batch: {"target": np.ones_like(batch["target"])})
    other = with_sources(built, burning, context.validation).run(state, LAST)
    assert other["threshold"] == figures["threshold"]
    assert other["f1"] < sklearn.metrics.f1_score(np.ones(24 * 256), np.ones(24 * 256)) == 1
    assert {name: other[name] for name in other if "validation" in name} == {
        name: figures[name] for name in figures if "validation" in name
    }
    # All validation pixels burn: the threshold follows.
    burning = Relabelled(context.validation, lambda batch: {"target": np.ones_like(batch["target"])})
    other = with_sources(built, context.test, burning).run(state, LAST)
    assert scipy.special.logit(other["threshold"]) == pytest.approx(validation.min(), abs=1e-5)
    assert other["average_precision"] == figures["average_precision"] and other["f1"] != figures["f1"]


def test_unknown_pixels_change_nothing(built):
    context, state, _, figures = built

    def hide(batch):
        known = np.indices((16, 16)).sum(0)[..., None] % 7 > 0  # a lattice of pixels
        return {"known": np.broadcast_to(known, batch["known"].shape)}

    def garble(batch):
        hidden = hide(batch)["known"]
        return {"known": hidden, "target": batch["target"] ^ ~hidden}

    hidden, garbled = (
        with_sources(built, Relabelled(context.test, change), context.validation).run(state, LAST)
        for change in (hide, garble)
    )
    assert hidden == garbled and hidden["average_precision"] != figures["average_precision"]


def test_without_validation_data_epochs_are_not_judged_and_the_threshold_is_one_half(built):
    context, state, evaluator, figures = built
    alone = with_sources(built, context.test, None)
    assert [alone.due(moment) for moment in (UNTRAINED, FIRST, LAST)] == [True, False, True]
    assert not alone.choosable and set(evaluator.choosable) <= evaluator.run(state, FIRST).keys()
    final = alone.run(state, LAST)
    assert final["threshold"] == 0.5 and not final["threshold_is_chosen"]
    assert "data.validation = 0" in alone.caveat(final) and "data.validation" not in evaluator.caveat(figures)
    assert final["average_precision"] == figures["average_precision"]
    assert not any(name.startswith("validation") for name in final)


def test_where_nothing_held_out_burns_the_threshold_is_not_chosen(built):
    context, state, _, figures = built
    cold = Relabelled(context.validation, lambda batch: {"target": np.zeros_like(batch["target"])})
    evaluator = with_sources(built, context.test, cold)
    final = evaluator.run(state, LAST)
    assert final["threshold"] == 0.5 and final["threshold_is_chosen"] is False and figures["threshold_is_chosen"]
    assert "nothing held out burns: masks are cut at probability 0.5" in evaluator.caveat(final)


def test_baselines_are_fitted_on_training_data_alone(built):
    context, state, evaluator, _ = built

    def flipped(batch):
        return {"target": ~batch["target"]}

    sources = [Relabelled(source, flipped) for source in (context.train, context.test, context.validation)]
    other = with_sources(built, *sources[1:])
    other.run(state, LAST)
    batch = context.test.batch(np.arange(8))
    for name, scorer in evaluator._fitted.items():
        np.testing.assert_array_equal(other._fitted[name](batch), scorer(batch), name)
    other = NextMask(
        EvaluationContext(context.config, context.program, (sources[0], context.test), validation=context.validation)
    )
    assert all(not np.allclose(other._fitted[name](batch), scorer(batch)) for name, scorer in evaluator._fitted.items())


def test_of_a_large_split_whole_fires_are_evaluated_and_a_caveat_says_so(built, monkeypatch):
    context, state, evaluator, figures = built
    assert figures["test_elements"] == 24
    monkeypatch.setattr(next_mask, "MOST_PIXELS", 10 * 256)  # two fires of four elements, not the half of a third
    small = with_sources(built, context.test, context.validation)
    final = small.run(state, LAST)
    assert final["test_elements"] == 8 and final["test_fires"] == 2 and len(small.validation) == 8
    assert "figures are of 8 of 24 test elements" in small.caveat(final)
    batch = context.test.batch(np.arange(24))
    chosen = np.isin(batch["fire_id"], small.test.batch(np.arange(8))["fire_id"])
    expected = sklearn.metrics.average_precision_score(
        batch["target"][chosen].ravel(), scores_of(built, context.test)[chosen].ravel()
    )
    assert final["average_precision"] == pytest.approx(expected)
    monkeypatch.setattr(next_mask, "MOST_PIXELS", 3 * 256)  # less than one fire
    assert len(with_sources(built, context.test, None).test) == 3


def test_wind_of_the_same_fire_is_a_caveat(built):
    context, state, evaluator, figures = built
    one = Relabelled(context.test, lambda batch: {"fire_id": np.zeros_like(batch["fire_id"])})
    alone = with_sources(built, one, context.validation)
    final = alone.run(state, LAST)
    assert final["shuffled_wind_of_own_fire"] == 24 and figures["shuffled_wind_of_own_fire"] == 0
    assert "24 of 24 elements got wind of their own fire" in alone.caveat(final)
    assert "own fire" not in evaluator.caveat(figures)


def test_calibration_gives_the_statistics_of_training_elements():
    context, state = context_of(fire_config(method__name="tests.projects.wildfire.evals.pixel_method:NormalisedPixels"))
    fresh, once = (context.encoder(state, count).stats["norm"] for count in (0, 8))
    np.testing.assert_array_equal(fresh["mean"], 0)
    seen = context.train.batch(fixed_order(len(context.train))[:8])["static"]
    np.testing.assert_allclose(once["mean"], seen.mean((0, 1, 2)), rtol=1e-4)
    np.testing.assert_allclose(once["var"], seen.var((0, 1, 2)), rtol=1e-3)


def test_the_untrained_model_is_scored_with_estimated_statistics():
    options = {
        "method__name": "tests.projects.wildfire.evals.pixel_method:NormalisedPixels",
        "eval__calibration_images": 0,
    }
    context, state = context_of(fire_config(**options))
    evaluator = NextMask(context)
    target, _ = truth_of(context.test)
    whole = len(context.train)
    fresh, estimated = (
        sklearn.metrics.average_precision_score(
            target.ravel(),
            evaluator.predictor.with_weights(encoder.params, encoder.stats).scores(context.test).ravel(),
        )
        for encoder in (context.encoder(state, count) for count in (0, whole))
    )
    assert evaluator.run(state, UNTRAINED)["untrained_average_precision"] == pytest.approx(estimated)
    assert abs(fresh - estimated) > 1e-3


def test_epochs_are_judged_on_validation_data_alone(built):
    context, state, evaluator, figures = built
    assert [evaluator.due(moment) for moment in (UNTRAINED, FIRST, LAST)] == [True, True, True]
    epoch = evaluator.run(state, FIRST)
    expected = {f"validation_{name}" for name in AT_A_THRESHOLD}
    expected |= {f"validation_baseline_{name}" for name in ("average_precision", "new_average_precision")}
    assert epoch.keys() == expected and all(figures[name] == value for name, value in epoch.items())
    untrained = evaluator.run(state, UNTRAINED)
    assert untrained == {f"untrained_{name}": figures[name] for name in ("average_precision", "new_average_precision")}


def test_what_does_not_depend_on_the_model_is_read_once(built):
    context, state, _, _ = built
    reads = []

    def count(batch):
        reads.append(len(batch["target"]))
        return {}

    evaluator = with_sources(built, context.test, Relabelled(context.validation, count))
    evaluator.run(state, FIRST)
    first = sum(reads)
    evaluator.run(state, FIRST)
    evaluator.run(state, FIRST)
    again = (sum(reads) - first) / 2
    assert again == first - len(context.validation)  # predictions read batches; truth and baselines were kept


def test_words_name_the_best_baseline_and_few_fires_are_a_caveat(built):
    context, state, evaluator, figures = built
    words = evaluator.in_words(figures)
    assert words.startswith(f"AP {figures['average_precision']:.3f} (best baseline ")
    assert f"newly burning with other wind {figures['shuffled_wind_new_average_precision']:.3f}" in words
    assert evaluator.in_words(evaluator.run(state, FIRST)).startswith("validation:  AP ")
    assert evaluator.caveat(figures).startswith("6 test fires prove nothing")
    assert evaluator.caveat({**figures, "test_fires": 30}) is None


def test_without_scikit_learn_there_is_one_error_before_anything_is_compiled(built, monkeypatch):
    context, *_ = built
    monkeypatch.setitem(sys.modules, "sklearn.ensemble", None)
    with pytest.raises(UserError, match=r"next_mask: .* needs scikit-learn; pip install 'jepa_jax\[sklearn\]'"):
        NextMask(context)


def test_data_without_masks_are_refused():
    images = tiny_config()
    sources = open_data(images.data)
    context, _ = context_of(fire_config())
    context = EvaluationContext(images, context.program, (sources.train, sources.test))
    with pytest.raises(
        UserError,
        match="data.source = shapes: next_mask needs .* fire, fire_id, known, static, target, valid, wind; use",
    ):
        NextMask(context)


def test_a_run_learns_and_keeps_the_state_that_is_best_on_validation_data(tmp_path):
    console, chosen = Silent(), "validation_new_average_precision"
    config = fire_config(mesh__data=1, optim__epochs=6.0, train__keep_best=chosen)
    summary = train(config, tmp_path, resume="auto", console=console)
    assert summary["new_average_precision"] > summary["untrained_new_average_precision"]
    logged = [row[f"eval/{chosen}"] for row in rows(tmp_path) if f"eval/{chosen}" in row]
    assert len(logged) >= 6 and summary[chosen] == pytest.approx(max(logged))
    assert json.loads((tmp_path / "summary.json").read_text())["test_fires"] == 6
    assert any("prove nothing" in line for line in console.lines)
    assert any(line.startswith("trained:  AP") for line in console.lines)
