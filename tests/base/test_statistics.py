"""Intervals: published values, the coverage they claim, planted effects found, and nothing else found."""

import dataclasses
import math

import numpy as np
import pytest
from scipy import stats

from jepa_jax.base import statistics
from jepa_jax.base.statistics import (
    SAME,
    SLOWER,
    accuracy_interval,
    bonferroni_level,
    compare_speeds,
    fit_speeds,
    speed_interval,
    student_quantile,
)
from jepa_jax.experiments import recommendation
from tests.experiments.made_rows import make_row, simulate
from tests.tiny import tiny_config


@pytest.mark.parametrize(
    "right, images, low, high",
    [(0, 10, 0.0, 27.75), (10, 10, 72.25, 100.0), (50, 100, 40.38, 59.62), (81, 263, 25.53, 36.62)],
)
def test_accuracies_have_wilsons_interval(right, images, low, high):
    """The last case is example 81/263 of Newcombe, 1998."""
    assert accuracy_interval(100 * right / images, images) == pytest.approx((low, high), abs=0.006)


def test_students_quantiles():
    assert [student_quantile(n) for n in (1, 3, 10)] == pytest.approx([12.706, 3.182, 2.228], abs=5e-4)


class TestIntervals:
    def test_equals_students_interval_of_the_logarithms(self):
        values = [100.0, 104.0, 97.0]
        low, high = np.exp(stats.t.interval(0.95, 2, np.mean(np.log(values)), stats.sem(np.log(values))))
        assert speed_interval(values) == pytest.approx((low, high))
        assert speed_interval([100.0]) is None

    def test_covers_the_truth_as_often_as_it_says(self):
        rng = np.random.default_rng(0)
        intervals = [speed_interval(500 * np.exp(0.05 * rng.normal(size=3))) for _ in range(600)]
        covered = [low < 500 < high for low, high in intervals]
        assert 0.92 < np.mean(covered) < 0.98


class TestCompare:
    def test_two_rows_alone_are_a_paired_t_test(self):
        a, b = [100.0, 90.0, 110.0], [95.0, 88.0, 103.0]
        ratios = np.log(a) - np.log(b)
        low, high = np.exp(stats.t.interval(0.95, 2, ratios.mean(), stats.sem(ratios)))
        found = compare_speeds(make_row(a), make_row(b, batch_size=128))
        assert (found.ratio, found.low, found.high) == pytest.approx((math.exp(ratios.mean()), low, high))

    def test_a_slow_round_of_the_whole_machine_is_no_noise(self):
        rows = [make_row([100.0, 50.0, 100.0]), make_row([110.0, 55.0, 110.0], batch_size=128)]
        found = compare_speeds(rows[1], rows[0])
        assert found.verdict == statistics.FASTER and found.ratio == pytest.approx(1.1)

    def test_rows_without_a_common_round_are_compared_by_way_of_a_third(self):
        a, b = make_row([100.0, None]), make_row([None, 240.0], batch_size=128)
        c = make_row([100.0, 200.0], batch_size=256)  # round 2 is twice as fast
        assert math.isnan(compare_speeds(a, b).ratio)
        assert compare_speeds(b, a, fit_speeds([a, b, c])).ratio == pytest.approx(1.2)

    def test_a_few_repeats_that_are_far_off_hide_nothing(self):
        found = falsely = 0
        for seed in range(40):
            rows = simulate(seed, slow=0.1, hiccups=0.15, repeats=5)
            model = fit_speeds(rows)
            float32, bfloat16 = rows[0], rows[2]  # of the same batch and workers
            found += compare_speeds(bfloat16, float32, model).verdict == statistics.SLOWER
            falsely += compare_speeds(rows[0], rows[1], model).verdict != statistics.SAME
        assert found > 28 and falsely < 8  # by least squares some 6 are found

    def test_without_noise_the_fit_is_exact(self):
        model = fit_speeds(simulate(0, sigma=0.0, slow=0.1))
        assert model.noise_percent == pytest.approx(0, abs=1e-9)

    def test_one_repeat_proves_nothing(self):
        found = compare_speeds(make_row([100.0]), make_row([50.0], batch_size=128))
        assert found.verdict == statistics.UNKNOWN and found.to_dict()["interval"] is None

    def test_says_what_it_can_tell_apart_and_how_many_repeats_would_tell_more(self):
        rows = simulate(3, sigma=0.08, repeats=4)
        model = fit_speeds(rows)
        found = compare_speeds(rows[0], rows[1], model)
        assert model.resolution(4) == pytest.approx(found.high / found.ratio - 1, rel=1e-9)
        needed = model.repeats_to_resolve(0.05)
        assert model.resolution(needed) == pytest.approx(0.05, rel=0.1)
        text = " ".join(recommendation.recommend(rows, config=tiny_config()).text)
        assert f"about {needed} would show one of 5 %" in text

    def test_equal_rows_are_told_apart_one_time_in_twenty(self):
        verdicts = []
        for seed in range(60):
            rows = simulate(seed)
            model = fit_speeds(rows)
            pairs = [(rows[i], rows[i + 1]) for i in range(0, 12, 2)]  # they differ in workers alone, which do nothing
            verdicts += [compare_speeds(a, b, model).verdict for a, b in pairs]
        assert 0.01 < np.mean([verdict != statistics.SAME for verdict in verdicts]) < 0.10


def test_a_card_is_a_factor_of_its_own():
    rng = np.random.default_rng(0)
    cards = {"a": 1.0, "b": 0.93, "c": 1.05}
    rows = []
    for i in range(6):
        names = [list(cards)[(i + k) % 3] for k in range(3)]
        speeds = [100.0 * (0.95 if i == 5 else 1.0) * cards[name] * np.exp(0.005 * rng.normal()) for name in names]
        row = make_row(speeds, batch_size=8 * (i + 1))
        repeats = [
            dataclasses.replace(repeat, figures=dataclasses.replace(repeat.figures, card=name))
            for repeat, name in zip(row.repeats, names, strict=True)
        ]
        rows.append(dataclasses.replace(row, repeats=tuple(repeats)))
    model = fit_speeds(rows)
    assert model.noise_percent < 1
    found = compare_speeds(rows[5], rows[0], model)
    assert found.verdict == SLOWER and found.ratio == pytest.approx(0.95, abs=0.01)
    unnamed = [make_row(list(row.speeds.values()), batch_size=row.combination.batch_size) for row in rows]
    assert fit_speeds(unnamed).noise_percent > 3  # else the cards are noise


def test_a_card_for_every_trial_is_noise_and_no_factor():
    rows = []
    for i, speeds in enumerate(([100.0, 103.0], [101.0, 99.0])):
        row = make_row(speeds, batch_size=8 * (i + 1))
        repeats = [
            dataclasses.replace(one, figures=dataclasses.replace(one.figures, card=f"node{i} {k}"))
            for k, one in enumerate(row.repeats)
        ]
        rows.append(dataclasses.replace(row, repeats=tuple(repeats)))
    assert fit_speeds(rows).freedom == 1  # two combinations, two rounds


def test_one_degree_of_freedom_at_a_strict_level_gives_an_unbounded_interval():
    rows = [make_row([100.0, 150.0]), make_row([110.0, 40.0], batch_size=128)]
    found = fit_speeds(rows).contrast({rows[0].combination: 1.0, rows[1].combination: -1.0}, bonferroni_level(10_000))
    assert found.verdict == SAME and found.high == math.inf and found.to_dict()["interval"] is None
    assert "inf" in str(found)
    assert speed_interval([1e-30, 1e30]) is None
