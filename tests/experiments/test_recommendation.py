"""What a sweep recommends: intervals with the coverage they claim, planted effects found, and nothing else found."""

import dataclasses
import itertools
import math
import pathlib

import numpy as np
import pytest
from scipy import stats

from jepa_jax.experiments import knob_effects, recommendation
from jepa_jax.experiments import speed_statistics as statistics
from jepa_jax.experiments.advice import learning_rate_advice, what_limits
from jepa_jax.experiments.speed_statistics import compare_speeds, fit_speeds, t_interval
from tests.experiments.made_rows import PLAIN, make_row
from tests.tiny import tiny_config

ROOT = pathlib.Path(__file__).parents[2]


def simulate(seed, *, sigma=0.015, repeats=3, slow=0.0, drift=0.05, hiccups=0.0, fingerprint=False):
    """Twelve combinations (batch x precision x workers); bfloat16 is slower by `slow`, workers change nothing.

    `hiccups`: share of the repeats that somebody else's work slows by up to a half. `fingerprint`: only the batch makes
    another program.
    """
    rng = np.random.default_rng(seed)
    rounds = drift * rng.normal(size=repeats)
    rows = []
    for batch, precision, workers in itertools.product((64, 128, 256), ("float32", "bfloat16"), (0, 2)):
        level = math.log(1000 + batch) + (math.log(1 - slow) if precision == "bfloat16" else 0.0)
        logs = level + rounds + sigma * rng.normal(size=repeats)
        logs -= (rng.random(repeats) < hiccups) * rng.uniform(0.2, 0.6, repeats)
        prints = {"program_fingerprint": f"step of {batch}", "pipeline_fingerprint": "p"} if fingerprint else {}
        knobs = {"batch_size": batch, "precision": precision, "num_workers": workers}
        rows.append(make_row(np.exp(logs).tolist(), **knobs, **prints))
    return rows


def effect_of(rows, knob):
    entries = knob_effects.knob_effects(rows, fit_speeds(rows))
    return next(entry for entry in entries if entry["knob"] == knob)


class TestIntervals:
    def test_equals_students_interval_of_the_logarithms(self):
        values = [100.0, 104.0, 97.0]
        low, high = np.exp(stats.t.interval(0.95, 2, np.mean(np.log(values)), stats.sem(np.log(values))))
        assert t_interval(values) == pytest.approx((low, high))
        assert t_interval([100.0]) is None

    def test_covers_the_truth_as_often_as_it_says(self):
        rng = np.random.default_rng(0)
        covered = [
            low < 500 < high for low, high in (t_interval(500 * np.exp(0.05 * rng.normal(size=3))) for _ in range(600))
        ]
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


class TestKnobs:
    def test_a_planted_slow_down_of_10_percent_is_found_and_a_knob_without_effect_is_not(self):
        slowed, idle = [], []
        for seed in range(40):
            rows = simulate(seed, sigma=0.02, slow=0.10)
            precision = effect_of(rows, "precision")
            slowed.append(precision["effect"] == knob_effects.EFFECT)
            # float32 sorts after bfloat16, so the ratio is that of the faster one.
            low, high = precision["comparisons"][0]["interval"]
            assert 1.05 < low < high < 1.18
            idle.append(effect_of(rows, "num_workers")["effect"] == knob_effects.NOT_MEASURABLE)
        assert all(slowed)
        assert np.mean(idle) > 0.8  # 0.89 over 200 seeds: an interval for the mean and one for each pair

    def test_the_same_program_and_pipeline_is_no_effect_by_construction(self):
        rows = simulate(0, fingerprint=True)
        found = effect_of(rows, "precision")
        assert found["effect"] == knob_effects.BY_CONSTRUCTION
        assert "no effect by construction" in found["text"]
        assert effect_of(rows, "batch_size")["effect"] == knob_effects.EFFECT

    def test_a_gain_here_that_is_a_loss_there_is_an_effect(self):
        rows = [
            make_row([100, 101, 99], batch_size=64), make_row([120, 121, 119], batch_size=64, num_workers=2),
            make_row([120, 121, 119], batch_size=128), make_row([100, 101, 99], batch_size=128, num_workers=2),
        ]  # fmt: skip
        found = effect_of(rows, "num_workers")
        assert found["comparisons"][0]["ratio"] == pytest.approx(1.0)
        assert found["effect"] == knob_effects.EFFECT

    def test_a_knob_that_was_not_swept_is_not_spoken_of(self):
        rows = simulate(0)
        found = {entry["knob"] for entry in knob_effects.knob_effects(rows, fit_speeds(rows))}
        assert found == {"batch_size", "precision", "num_workers"}

    def test_values_never_measured_side_by_side_stay_unknown(self):
        rows = [make_row([100, 101]), make_row([], status="crashed", precision="bfloat16")]
        assert effect_of(rows, "precision")["effect"] == statistics.UNKNOWN


class TestRecommendation:
    config = tiny_config(data__batch_size=64)

    def recommend(self, rows, **options):
        return recommendation.recommend(rows, config=self.config, **options)

    def test_the_fastest_wins_when_it_is_clearly_faster(self):
        rows = [
            make_row([100, 101, 99]),
            make_row([120, 121, 122], batch_size=128, process_memory_bytes=9e9),
            make_row([80, 81, 80], batch_size=256),
        ]
        result = self.recommend(rows)
        assert result.best.batch_size == 128 and result.tied == ()

    def test_of_equals_the_one_with_less_memory_then_with_fewer_workers(self):
        rows = [
            make_row([100.5, 101, 99], num_workers=4, process_memory_bytes=1.00e9),
            make_row([100.5, 99, 102], num_workers=2, process_memory_bytes=1.01e9),  # as good as the same
            make_row([101, 100, 101], batch_size=128, process_memory_bytes=2e9),
            make_row([50, 51, 50], batch_size=32, process_memory_bytes=0.5e9),
        ]  # fmt: skip
        result = self.recommend(rows)
        assert result.best == dataclasses.replace(PLAIN, num_workers=2)
        assert len(result.tied) == 2
        assert "same within noise" in " ".join(result.text)

    def test_workers_that_do_nothing_are_not_chosen_for_the_memory_of_a_lucky_reading(self):
        same = {"pipeline": "device", "program_fingerprint": "p", "pipeline_fingerprint": "device"}
        rows = [
            make_row([100, 101, 99], num_workers=0, process_memory_bytes=1.1e9, **same),
            make_row([100, 99, 102], num_workers=4, process_memory_bytes=1.0e9, **same),
        ]
        assert self.recommend(rows).best.num_workers == 0

    def test_of_equal_rows_the_luckiest_is_rarely_shown_to_be_faster_than_the_config(self):
        wrong = []
        for seed in range(60):
            rng = np.random.default_rng(seed)
            rows = [make_row(np.exp(0.02 * rng.normal(size=3)).tolist(), batch_size=8 * (i + 1)) for i in range(12)]
            wrong.append(recommendation.choose(rows, fit_speeds(rows), rows[0]).verdict == recommendation.SHOWN)
        assert np.mean(wrong) < 0.1  # at 95 % for each of them it would be a third

    def test_a_loss_that_is_not_finite_is_never_chosen(self):
        rows = [make_row([100, 101, 99]), make_row([200, 201, 199], batch_size=128, finite=False)]
        result = self.recommend(rows)
        assert result.best.batch_size == 64 and "not finite" in " ".join(result.text)
        only = self.recommend(rows[1:])
        assert only.best is None and only.text[0] == "Nothing to recommend: no combination has a finite loss."

    def test_a_fixed_batch_of_which_nothing_was_measured_is_named(self):
        rows = [make_row([100, 101, 99]), make_row([], status="out_of_memory", batch_size=128)]
        text = self.recommend(rows, fixed_batch=128).text
        assert text[0] == "Nothing to recommend: no combination with a batch of 128 images could be measured."

    def test_device_memory_counts_before_that_of_the_process(self):
        assert make_row([1.0], peak_memory_bytes=5, process_memory_bytes=7).memory_bytes == 5
        assert make_row([1.0], process_memory_bytes=7).memory_bytes == 7
        assert make_row([1.0], process_memory_bytes=None).memory_bytes == math.inf

    def test_a_fixed_batch_leaves_the_others_out(self):
        rows = [make_row([100, 101, 99]), make_row([200, 201, 199], batch_size=128)]
        result = self.recommend(rows, fixed_batch=64)
        assert result.best.batch_size == 64 and result.learning_rate_advice is None

    def test_a_leak_is_recommended_only_if_there_is_nothing_else(self):
        rows = [make_row([100, 101, 99]), make_row([200, 201, 199], batch_size=128, leak=True)]
        assert self.recommend(rows).best.batch_size == 64
        assert "Memory grows" in " ".join(self.recommend(rows).text)
        only = self.recommend(rows[1:])
        assert only.best.batch_size == 128 and "All rows leak" in " ".join(only.text)

    def test_without_a_measured_row_there_is_no_choice(self):
        failed = [make_row([], status="out_of_memory", reason="..."), make_row([], status="skipped", batch_size=128)]
        result = self.recommend(failed)
        assert result.best is None and result.text[0].startswith("Nothing to recommend")
        assert "1 of 2 combinations failed: 1 out of memory" in " ".join(result.text)
        assert self.recommend([]).best is None

    def test_one_repeat_shows_nothing_and_says_so(self):
        result = self.recommend([make_row([100]), make_row([101], batch_size=128)])
        assert result.best.batch_size == 64 and result.verdict == recommendation.KEEP and result.gain is None
        assert "measured once" in " ".join(result.text)
        without_config = self.recommend([make_row([101], batch_size=128), make_row([90], batch_size=32)])
        assert without_config.best.batch_size == 128 and without_config.verdict == recommendation.NO_CONFIG

    def test_a_gain_whose_interval_contains_1_keeps_the_config_in_text_and_figures(self):
        rows = [
            make_row([100, 130, 80]),
            make_row([120, 95, 140], batch_size=128),
            make_row([90, 91, 92], batch_size=8),
        ]
        result = self.recommend(rows)
        leader, gain = result.not_shown
        assert result.text[0].startswith("Nothing shown: keep the config as given (batch 64,")
        assert "the interval contains 1" in result.text[1] and f"{gain.ratio:.3f}x" in result.text[1]
        assert result.best.batch_size == 64 and leader.batch_size == 128 and gain.low < 1 < gain.high
        conclusion = result.to_dict()
        assert conclusion["gain"] is None and conclusion["verdict"] == "nothing shown: keep the config"
        assert conclusion["samples_per_sec"] == pytest.approx(rows[0].samples_per_sec)

    def test_the_interval_of_a_selected_best_grows_with_the_number_it_was_selected_from(self):
        rows = [make_row([100, 101, 99]), make_row([104, 106, 105], batch_size=128)]
        others = [make_row([90, 91, 89.5], batch_size=8 * i) for i in range(1, 6)]
        model = fit_speeds([*rows, *others])
        alone = recommendation.choose(rows, model, rows[0])
        selected = recommendation.choose([*rows, *others], model, rows[0])
        assert alone.gain.ratio == pytest.approx(selected.gain.ratio) and selected.gain.low < alone.gain.low
        searched = recommendation.choose(rows, model, rows[0], comparisons=6)  # a search looked at all of them before
        assert searched.gain == selected.gain

    def test_simulated_choices_give_away_little_speed(self, monkeypatch):
        monkeypatch.syspath_prepend(ROOT / "profiling")
        import check_choice

        for noise, most in check_choice.MOST_LOSS.items():
            found = [loss for loss, _ in check_choice.losses("factor of two", noise, 60, with_config=False)]
            assert np.mean(found) <= most

    @pytest.mark.parametrize("wait, words", [(0.4, "loader limits"), (0.01, "Computing limits"), (None, "Computing")])
    def test_names_what_limits(self, wait, words):
        assert words in what_limits(make_row([1.0], data_wait_fraction=wait))

    def test_a_full_device_limits_the_batch(self):
        figures = {"peak_memory_bytes": 90, "data_wait_fraction": 0.0}
        assert "Memory limits" in what_limits(make_row([1.0], **figures), 100)
        row = make_row([1.0], device_limit_bytes=100, **figures)
        assert "Memory limits" in what_limits(row)
        assert "Computing limits" in what_limits(row, 200)

    def test_a_device_that_hardly_computes_promises_no_figure(self):
        assert "at most 2.00x" in what_limits(make_row([1.0], data_wait_fraction=0.5))
        assert "more than 10x" in what_limits(make_row([1.0], data_wait_fraction=0.97))


class TestLearningRate:
    def advice(self, batch_size, **optim):
        config = tiny_config(data__batch_size=128, optim__lr=0.001, **optim)
        return learning_rate_advice(config, batch_size)

    def test_both_rules(self):
        advice = self.advice(512)
        assert advice["linear"]["optim.lr"] == pytest.approx(0.004)
        assert advice["sqrt"]["optim.lr"] == pytest.approx(0.002)
        assert "0.004" in advice["text"] and "0.002" in advice["text"]

    def test_the_same_batch_needs_none(self):
        assert self.advice(128) is None

    @pytest.mark.parametrize("scaling, rule", [("linear", "linear"), ("sqrt", "sqrt")])
    def test_a_config_that_scales_by_itself_keeps_its_rate_for_that_rule(self, scaling, rule):
        advice = self.advice(512, optim__batch_scaling=scaling, optim__reference_batch=256)
        assert advice[rule]["optim.lr"] == pytest.approx(0.001)
        other = {"linear": "sqrt", "sqrt": "linear"}[rule]
        assert advice["linear"]["peak"] / advice["sqrt"]["peak"] == pytest.approx(2.0)
        assert advice[other]["optim.lr"] == pytest.approx(0.001 * {"sqrt": 0.5, "linear": 2.0}[other])
