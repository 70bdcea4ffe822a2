"""Figures of whole sets, of single fires, and of fires drawn anew."""

import numpy as np
import pytest
import sklearn.metrics

from jepa_jax.projects.wildfire.evals.spread import (
    RESAMPLES,
    fire_figures,
    fire_spread,
    interval_95,
    resampled_average_precisions,
)
from jepa_jax.projects.wildfire.evals.truth import Truth, mask_figures, ranking_figures


def random_set(fires, per_fire=2, seed=0):
    """Returns a truth whose fires differ in their share of positives, and scores that are better for some fires."""
    rng = np.random.default_rng(seed)
    fire = np.repeat(10 * np.arange(fires), per_fire)
    shape = (len(fire), 6, 7)
    target = rng.random(shape) < rng.uniform(0.1, 0.4, (len(fire), 1, 1))
    known, burning = rng.random(shape) < 0.9, rng.random(shape) < 0.2
    skill = np.linspace(0, 3, len(fire))[:, None, None]
    return Truth(target, known, known & ~burning, fire), (rng.standard_normal(shape) + skill * target).astype("f4")


def test_unknown_pixels_do_not_count_and_new_ones_are_a_part_of_the_known_ones():
    truth, scores = random_set(5)
    figures = mask_figures(scores, truth, 0.7)
    weights = truth.known.ravel()
    flat = truth.target.ravel(), scores.ravel()
    assert figures["average_precision"] == pytest.approx(
        sklearn.metrics.average_precision_score(*flat, sample_weight=weights)
    )
    assert figures["new_average_precision"] == pytest.approx(
        sklearn.metrics.average_precision_score(*flat, sample_weight=truth.new.ravel())
    )
    predicted = scores.ravel() >= 0.7
    assert figures["iou"] == pytest.approx(sklearn.metrics.jaccard_score(flat[0], predicted, sample_weight=weights))
    changed = np.where(truth.known, scores, 99)
    assert mask_figures(changed, truth._replace(target=truth.target | ~truth.known), 0.7) == figures


def test_figures_of_a_set_are_not_means_over_its_elements():
    truth, scores = random_set(5)
    one_by_one = [mask_figures(scores[i : i + 1], Truth(*(v[i : i + 1] for v in truth)), 0.7) for i in range(10)]
    for name, value in mask_figures(scores, truth, 0.7).items():
        assert abs(value - np.mean([figures[name] for figures in one_by_one])) > 1e-3


def test_spread_is_that_of_the_fires_one_by_one():
    truth, scores = random_set(12)
    truth.target[truth.fire == 30] = False  # a fire that ends: it has no average precision
    spread = fire_spread(fire_figures(scores, truth, 0.5))
    precisions, new, f1s = {}, [], []
    for fire in set(truth.fire.tolist()) - {30}:
        counted = (truth.fire == fire)[:, None, None] & truth.known
        precisions[fire] = sklearn.metrics.average_precision_score(truth.target[counted], scores[counted])
        counted_new = counted & truth.new
        new.append(sklearn.metrics.average_precision_score(truth.target[counted_new], scores[counted_new]))
        f1s.append(sklearn.metrics.f1_score(truth.target[counted], scores[counted] >= 0.5))
    assert spread["fire_average_precision_mean"] == pytest.approx(np.mean(list(precisions.values())))
    assert spread["fire_average_precision_std"] == pytest.approx(np.std(list(precisions.values())))
    assert spread["fire_new_average_precision_mean"] == pytest.approx(np.mean(new))
    assert spread["fire_f1_mean"] == pytest.approx(np.mean(f1s))
    ranked = sorted(precisions, key=precisions.get)
    assert spread["worst_fires"] == ranked[:5] and spread["best_fires"] == ranked[:-6:-1]


def test_without_positives_nothing_is_measured():
    truth, scores = random_set(3)
    truth = truth._replace(target=np.zeros_like(truth.target))
    spread = fire_spread(fire_figures(scores, truth, 0.5))
    assert spread["worst_fires"] == spread["best_fires"] == [] and spread["fire_average_precision_mean"] is None
    assert set(ranking_figures(scores, truth).values()) == {None}
    assert interval_95(resampled_average_precisions(scores, truth)) is None


@pytest.mark.parametrize("new", [False, True])
def test_drawing_the_only_fire_again_gives_its_average_precision(new):
    truth, scores = random_set(1, per_fire=10)
    exact = ranking_figures(scores, truth)["new_average_precision" if new else "average_precision"]
    draws = resampled_average_precisions(scores, truth, new=new)
    assert draws.shape == (RESAMPLES,) and np.ptp(draws) == 0
    assert draws[0] == pytest.approx(exact, rel=1e-12)


def test_draws_equal_those_of_whole_copies_of_fires():
    truth, scores = random_set(6)
    draws = resampled_average_precisions(scores, truth)
    chosen = np.random.default_rng(0).multinomial(6, np.full(6, 1 / 6), RESAMPLES)
    for draw in range(3):
        weights = np.repeat(chosen[draw], 2)[:, None, None] * truth.known
        expected = sklearn.metrics.average_precision_score(
            truth.target.ravel(), scores.ravel(), sample_weight=weights.ravel()
        )
        assert draws[draw] == pytest.approx(expected)


def test_rounding_to_levels_hardly_moves_the_average_precision():
    rng = np.random.default_rng(1)
    target = rng.random((4, 200, 200)) < 0.1  # about 16,000 positives, eight per level
    scores = (rng.standard_normal(target.shape) + 2 * target).astype(np.float32)
    truth = Truth(target, np.ones_like(target), np.ones_like(target), np.zeros(4, int))
    exact = ranking_figures(scores, truth)["average_precision"]
    assert resampled_average_precisions(scores, truth)[0] == pytest.approx(exact, abs=1e-3)


def test_more_fires_give_a_narrower_interval_around_the_figure():
    widths = []
    for fires in (8, 128):
        truth, scores = random_set(fires)
        low, high = interval_95(resampled_average_precisions(scores, truth))
        assert low < ranking_figures(scores, truth)["average_precision"] < high
        widths.append(high - low)
    assert widths[1] < widths[0] / 2
