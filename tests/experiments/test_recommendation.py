"""What a sweep recommends: intervals with the coverage they claim, planted effects found, and nothing else found."""

import dataclasses
import math
import pathlib

import numpy as np
import pytest

from jepa_jax.base import statistics
from jepa_jax.base.statistics import fit_speeds
from jepa_jax.experiments import recommendation
from jepa_jax.experiments.recommendation import learning_rate_advice, what_limits
from tests.experiments.made_rows import PLAIN, make_row, simulate
from tests.tiny import tiny_config

ROOT = pathlib.Path(__file__).parents[2]


def effect_of(rows, knob):
    entries = recommendation.knob_effects(rows, fit_speeds(rows))
    return next(entry for entry in entries if entry["knob"] == knob)


class TestKnobs:
    def test_a_planted_slow_down_of_10_percent_is_found_and_a_knob_without_effect_is_not(self):
        slowed, idle = [], []
        for seed in range(40):
            rows = simulate(seed, sigma=0.02, slow=0.10)
            precision = effect_of(rows, "precision")
            slowed.append(precision["effect"] == recommendation.EFFECT)
            # float32 sorts after bfloat16, so the ratio is that of the faster one.
            low, high = precision["comparisons"][0]["interval"]
            assert 1.05 < low < high < 1.18
            idle.append(effect_of(rows, "num_workers")["effect"] == recommendation.NOT_MEASURABLE)
        assert all(slowed)
        assert np.mean(idle) > 0.8  # 0.89 over 200 seeds: an interval for the mean and one for each pair

    def test_the_same_program_and_pipeline_is_no_effect_by_construction(self):
        rows = simulate(0, fingerprint=True)
        found = effect_of(rows, "precision")
        assert found["effect"] == recommendation.BY_CONSTRUCTION
        assert "no effect by construction" in found["text"]
        assert effect_of(rows, "batch_size")["effect"] == recommendation.EFFECT

    def test_a_gain_here_that_is_a_loss_there_is_an_effect(self):
        rows = [
            make_row([100, 101, 99], batch_size=64), make_row([120, 121, 119], batch_size=64, num_workers=2),
            make_row([120, 121, 119], batch_size=128), make_row([100, 101, 99], batch_size=128, num_workers=2),
        ]  # fmt: skip
        found = effect_of(rows, "num_workers")
        assert found["comparisons"][0]["ratio"] == pytest.approx(1.0)
        assert found["effect"] == recommendation.EFFECT

    def test_a_knob_that_was_not_swept_is_not_spoken_of(self):
        rows = simulate(0)
        found = {entry["knob"] for entry in recommendation.knob_effects(rows, fit_speeds(rows))}
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
        assert result.best.batch_size == 128 and result.choice.tied == ()

    def test_of_equals_the_one_with_less_memory_then_with_fewer_workers(self):
        rows = [
            make_row([100.5, 101, 99], num_workers=4, process_memory_bytes=1.00e9),
            make_row([100.5, 99, 102], num_workers=2, process_memory_bytes=1.01e9),  # as good as the same
            make_row([101, 100, 101], batch_size=128, process_memory_bytes=2e9),
            make_row([50, 51, 50], batch_size=32, process_memory_bytes=0.5e9),
        ]  # fmt: skip
        result = self.recommend(rows)
        assert result.best == dataclasses.replace(PLAIN, num_workers=2)
        assert len(result.choice.tied) == 2
        assert "same within noise" in " ".join(result.text)

    def test_of_equal_rows_the_luckiest_is_rarely_shown_to_be_faster_than_the_config(self):
        wrong = []
        for seed in range(60):
            rng = np.random.default_rng(seed)
            rows = [make_row(np.exp(0.02 * rng.normal(size=3)).tolist(), batch_size=8 * (i + 1)) for i in range(12)]
            wrong.append(
                recommendation.choose_settings(rows, fit_speeds(rows), rows[0]).verdict == recommendation.SHOWN
            )
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
        assert result.best.batch_size == 64 and result.to_dict(self.config)["learning_rate_advice"] is None

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
        assert (
            result.best.batch_size == 64
            and result.choice.verdict == recommendation.KEEP
            and result.to_dict(self.config)["gain"] is None
        )
        assert "measured once" in " ".join(result.text)
        without_config = self.recommend([make_row([101], batch_size=128), make_row([90], batch_size=32)])
        assert without_config.best.batch_size == 128 and without_config.choice.verdict == recommendation.NO_CONFIG

    def test_a_gain_whose_interval_contains_1_keeps_the_config_in_text_and_figures(self):
        rows = [
            make_row([100, 130, 80]),
            make_row([120, 95, 140], batch_size=128),
            make_row([90, 91, 92], batch_size=8),
        ]
        result = self.recommend(rows)
        leader, gain = result.choice.leader.combination, result.choice.gain
        assert result.text[0].startswith("No significant speed-up: keep the config as given (batch 64,")
        assert "the interval contains 1" in result.text[1] and f"{gain.ratio:.3f}x" in result.text[1]
        assert result.best.batch_size == 64 and leader.batch_size == 128 and gain.low < 1 < gain.high
        conclusion = result.to_dict(self.config)
        assert conclusion["gain"] is None and conclusion["verdict"] == "nothing shown: keep the config"
        assert conclusion["samples_per_sec"] == pytest.approx(rows[0].samples_per_sec)

    def test_the_interval_of_a_selected_best_grows_with_the_number_it_was_selected_from(self):
        rows = [make_row([100, 101, 99]), make_row([104, 106, 105], batch_size=128)]
        others = [make_row([90, 91, 89.5], batch_size=8 * i) for i in range(1, 6)]
        model = fit_speeds([*rows, *others])
        alone = recommendation.choose_settings(rows, model, rows[0])
        selected = recommendation.choose_settings([*rows, *others], model, rows[0])
        assert alone.gain.ratio == pytest.approx(selected.gain.ratio) and selected.gain.low < alone.gain.low
        searched = recommendation.choose_settings(
            rows, model, rows[0], comparisons=6
        )  # a search looked at all of them before
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
