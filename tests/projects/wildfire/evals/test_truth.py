"""Average precision, thresholds and counts against scikit-learn and against trying everything."""

import numpy as np
import pytest
import sklearn.metrics
from hypothesis import given, settings
from hypothesis import strategies as st

from jepa_jax.projects.wildfire.evals.truth import Ranking, average_precision, best_threshold, threshold_figures

# Few distinct scores: most of them are tied, also between positives and negatives.
PIXELS = st.lists(st.tuples(st.integers(0, 6), st.booleans()), min_size=1, max_size=60)


def f1_score(target, predicted):
    return 2 * np.sum(target & predicted) / (np.sum(target) + np.sum(predicted))


def arrays(pixels):
    scores, target = zip(*pixels, strict=True)
    return np.array(scores, np.float32) / 7, np.array(target)


@settings(max_examples=200)
@given(PIXELS)
def test_average_precision_equals_that_of_scikit_learn_with_ties(pixels):
    scores, target = arrays(pixels)
    found = average_precision(Ranking.of(scores, target))
    if target.any():
        assert found == pytest.approx(sklearn.metrics.average_precision_score(target, scores), rel=1e-12)
    else:
        assert found is None


def test_average_precision_equals_that_of_scikit_learn_on_many_pixels():
    rng = np.random.default_rng(0)
    target = rng.random(200_000) < 0.05
    scores = (rng.standard_normal(200_000) + 1.5 * target).astype(np.float32)
    expected = sklearn.metrics.average_precision_score(target, scores)
    assert average_precision(Ranking.of(scores, target)) == pytest.approx(expected, rel=1e-12)


def test_scores_that_do_not_differ_have_the_base_rate_as_average_precision():
    target = np.arange(40) < 3
    assert average_precision(Ranking.of(np.zeros(40), target)) == pytest.approx(3 / 40)


@settings(max_examples=200)
@given(PIXELS)
def test_no_threshold_has_a_higher_f1_than_the_chosen_one(pixels):
    scores, target = arrays(pixels)
    threshold = best_threshold(Ranking.of(scores, target))
    if threshold is None:
        assert not target.any()
        return
    tried = {t: f1_score(target, scores >= t) for t in (*scores, 0.0, 2.0)}
    own = f1_score(target, scores >= threshold)
    assert own == pytest.approx(max(tried.values()))
    assert all(t <= threshold for t, f1 in tried.items() if f1 > own - 1e-9)  # of equals, the fewest false alarms


@settings(max_examples=30)
@given(PIXELS)
def test_counts_give_the_figures_of_scikit_learn(pixels):
    scores, target = arrays(pixels)
    predicted = scores >= 0.5
    figures = threshold_figures(predicted, target)
    expected = {
        "precision": sklearn.metrics.precision_score,
        "recall": sklearn.metrics.recall_score,
        "f1": sklearn.metrics.f1_score,
        "iou": sklearn.metrics.jaccard_score,
    }
    assert figures == pytest.approx({name: f(target, predicted, zero_division=0.0) for name, f in expected.items()})
