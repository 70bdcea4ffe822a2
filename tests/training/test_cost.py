"""The predicted length of a run: what is evaluated when, and how long that takes."""

import dataclasses

import pytest

from jepa_jax.evals.evaluators import Stage, moment_after
from jepa_jax.program.build import Length
from jepa_jax.training.cost import Cost, all_counted, evaluations, roughly, total
from tests.tiny import tiny_config

COST = Cost(steps=100, step_flops=4e9, elements={0: 10, 50: 20, 101: 70}, element_flops=1e9, rate=1e9)


class EveryEpoch:
    """Applies the model to 5 elements before training, 3 after epochs and 7 at the end."""

    def due(self, moment):
        return True

    def elements(self, moment):
        return {Stage.UNTRAINED: 5, Stage.EPOCH: 3, Stage.FINAL: 7}[moment.stage]


def test_each_evaluation_is_counted_with_the_calibration_before_it():
    config = tiny_config(eval__calibration_images=64)
    found = evaluations(config, Length(steps_per_epoch=4, total_steps=10), {"all": EveryEpoch()})
    assert found == {0: 69, 4: 67, 8: 67, 11: 71}
    found = evaluations(tiny_config(eval__every_steps=3), Length(4, 6), {"all": EveryEpoch()})
    assert list(found) == [0, 3, 4, 6, 7]


def test_an_evaluator_that_counts_nothing_is_no_measure_of_elements():
    class Plans(EveryEpoch):
        def elements(self, moment):
            return 0

    assert all_counted({"all": EveryEpoch()}, moment_after(0, 4))
    assert not all_counted({"all": EveryEpoch(), "plans": Plans()}, moment_after(0, 4))


def test_seconds_before_the_first_step_and_from_measured_steps():
    assert COST.seconds() == (400, 100) and COST.share == pytest.approx(0.2)
    assert COST.left(50, 2.0, 0.5) == (100, 35)
    assert COST.left(0, 2.0, None) == (200, 45)  # an element costs a quarter of a step
    assert dataclasses.replace(COST, rate=None).in_words() == []


def test_a_run_that_is_long_for_a_cpu_names_shorter_ones():
    assert len(COST.in_words()) == 1
    words = dataclasses.replace(COST, rate=1e6).in_words()
    assert "5.8 days (evaluation 27.8 h)" in words[0] and "cifar10_cpu" in words[1]


def test_lengths_of_time_are_rounded():
    assert [roughly(seconds) for seconds in (1, 62, 130, 5399, 5400, 9e5)] == [
        "5 s", "60 s", "2 min", "90 min", "1.5 h", "10.4 days",
    ]  # fmt: skip
    assert total(60, 0) == "60 s"
