"""What a final evaluation keeps to be shown."""

import numpy as np
import pytest
import scipy.special
import sklearn.metrics

from jepa_jax.evals.evaluators import Moment, Stage, build_evaluators
from jepa_jax.projects.wildfire.data.element import fire_element, fire_spec, stacked
from jepa_jax.projects.wildfire.evals.exhibits import mask_exhibits, prefixes
from jepa_jax.projects.wildfire.evals.spread import LISTED_FIRES, fire_figures
from jepa_jax.projects.wildfire.evals.truth import Truth
from tests.projects.wildfire.evals.pixel_method import context_of, fire_config

LAST = Moment(Stage.FINAL, 12, 2)


class Listed:
    """Elements in memory."""

    classes = ()

    def __init__(self, elements):
        self._elements = elements
        frames, size, _, _ = elements[0]["fire"].shape
        self.spec = fire_spec(size, 2, frames)

    def __len__(self):
        return len(self._elements)

    def batch(self, indices):
        return stacked([self._elements[i] for i in indices])


def made(lengths, fires, seed=0):
    """Returns random elements with histories of these lengths, of these fires, and the truth of them."""
    rng = np.random.default_rng(seed)
    elements = [
        fire_element(
            rng.random((length, 4, 4)) < 0.2, rng.random((length, 2)), rng.random((4, 4, 2)), rng.random((4, 4)) < 0.4,
            fire_id=fire, frames=5,
        )
        for length, fire in zip(lengths, fires, strict=True)
    ]  # fmt: skip
    source = Listed(elements)
    truth = Truth.empty(source.spec, len(source))
    truth.fill(np.arange(len(source)), source.batch(np.arange(len(source))))
    return source, truth


@pytest.fixture(scope="module")
def evaluated():
    """The context of an untrained model, its variables, its evaluator and what it exhibits."""
    context, state = context_of(fire_config())
    evaluator = build_evaluators(context)["next_mask"]
    assert evaluator.exhibits() == {}
    evaluator.run(state, LAST)
    encoder = context.encoder(state, 0)
    return context, (encoder.params, encoder.stats), evaluator, evaluator.exhibits()


def test_fires_are_shown_from_the_best_to_the_worst_by_scikit_learns_average_precision(evaluated):
    context, variables, evaluator, shown = evaluated
    scores = evaluator.predictor.with_weights(*variables).scores(context.test)
    batch = context.test.batch(np.arange(len(context.test)))
    expected = {}
    for fire in np.unique(batch["fire_id"]):
        own = batch["fire_id"] == fire
        expected[fire] = sklearn.metrics.average_precision_score(batch["target"][own].ravel(), scores[own].ravel())
    order = sorted(expected, key=expected.get, reverse=True)
    assert shown["fire_id"].tolist() == order and len(order) == 6  # all fires: five best, and the one that is left
    np.testing.assert_allclose(shown["average_precision"], [expected[fire] for fire in order], rtol=1e-5)
    assert shown["is_best"].tolist() == [True] * LISTED_FIRES + [False]


def test_the_longest_sequence_of_each_fire_is_shown_with_its_own_prediction(evaluated):
    context, variables, evaluator, shown = evaluated
    scores = evaluator.predictor.with_weights(*variables).scores(context.test)
    batch = context.test.batch(np.arange(len(context.test)))
    for i, fire in enumerate(shown["fire_id"]):
        own = np.flatnonzero(batch["fire_id"] == fire)
        assert shown["valid"][i].sum() == batch["valid"][own].sum(1).max()
        match = [j for j in own if (batch["fire"][j] == shown["fire"][i]).all()
                 and (batch["target"][j] == shown["target"][i]).all()]  # fmt: skip
        np.testing.assert_allclose(shown["probability"][i], scipy.special.expit(scores[match[0]]), atol=1e-3)


def test_the_spread_ends_with_what_the_model_predicts_for_the_whole_history(evaluated):
    context, variables, evaluator, shown = evaluated
    frames = len(shown["spread_wind"])
    assert shown["spread_masks"].shape == (frames + 1, 16, 16) and shown["spread_probability"].shape[0] == frames > 4
    batch = context.test.batch(np.arange(len(context.test)))
    same = [
        i for i in np.flatnonzero(batch["fire_id"] == shown["spread_fire_id"])
        if batch["valid"][i].sum() == frames and (batch["target"][i, ..., 0] == shown["spread_masks"][-1]).all()
    ]  # fmt: skip
    scores = evaluator.predictor.with_weights(*variables).scores(context.test)
    np.testing.assert_allclose(shown["spread_probability"][-1], scipy.special.expit(scores[same[0]]), atol=1e-3)


def test_nothing_is_compiled_for_what_is_shown(evaluated):
    context, _, evaluator, _ = evaluated
    # One program per bucket, which the figures need anyway.
    assert evaluator.predictor._logits._cache_size() == len(np.unique(context.test.buckets)) == 2


def test_a_prefix_has_the_frames_so_far_and_the_next_as_target():
    source, _ = made([4], [3])
    element = {name: array[0] for name, array in source.batch([0]).items()}
    batch = prefixes(element)
    assert batch["valid"].sum(1).tolist() == [1, 2, 3, 4] and set(batch) == set(source.spec)
    for i in range(4):
        np.testing.assert_array_equal(batch["fire"][i, 4 - i :], element["fire"][1 : 2 + i])
        np.testing.assert_array_equal(batch["wind"][i, 4 - i :], element["wind"][1 : 2 + i])
        assert not batch["fire"][i, : 4 - i].any()
        following = element["fire"][2 + i] if i < 3 else element["target"]
        np.testing.assert_array_equal(batch["target"][i], following)
    for name, array in element.items():
        np.testing.assert_array_equal(batch[name][3], array)


def test_fires_without_positives_are_not_shown_and_the_median_fire_spreads():
    source, truth = made([2, 5, 3, 4, 5, 5], [0, 0, 1, 2, 3, 4])
    truth.target[truth.fire == 2] = False
    scores = np.where(truth.target, 1.0, -1.0) * np.array([3, 3, 3, 1, 2, -1])[:, None, None]
    scores[4].flat[:8] = 2.5  # some false alarms
    shown = mask_exhibits(
        source, truth, scores, 0.0, fire_figures(scores, truth, 0.0), lambda source: np.zeros((len(source), 4, 4))
    )
    assert 2 not in shown["fire_id"] and set(shown["fire_id"][:2].tolist()) == {0, 1} and shown["fire_id"][3] == 4
    assert shown["threshold"] == 0.5 and shown["spread_fire_id"] in (0, 1)
    assert (shown["spread_probability"] == 0.5).all()
    everywhere = truth._replace(target=np.zeros_like(truth.target))
    assert mask_exhibits(source, everywhere, scores, 0.0, fire_figures(scores, everywhere, 0.0), len) == {}
