"""The page of plans: verdict, memory as a bar, kernels, ways out, and cards against each other."""

import pytest

from jepa_jax.planning.run_cost import PlanContext
from jepa_jax.reports.page import render
from jepa_jax.reports.plan_page import cards_table, memory_bar, plan_page
from tests.planning.test_planner import CIFAR, line_plan


def test_a_plan_that_fits_has_its_mark_at_the_end_of_the_card():
    plan, _ = line_plan(variants=False)
    page = render(plan_page([plan], PlanContext(CIFAR), "rapid <x>"))
    assert "NVIDIA GeForce RTX 4090" in page and "rapid &lt;x&gt;" in page and '<p class="good">fits: ' in page
    bar = memory_bar(plan.estimate).bars[0]
    assert bar.mark == 100 and bar.width < 100
    assert sum(piece.percent for piece in bar.pieces) == pytest.approx(100)


def test_a_plan_that_does_not_fit_reaches_beyond_its_mark():
    plan, _ = line_plan(batch=32768, variants=False)
    page = render(plan_page([plan], PlanContext(CIFAR), "rapid"))
    bar = memory_bar(plan.estimate).bars[0]
    assert '<p class="bad">does not fit: ' in page
    assert bar.width == 100 and bar.mark < 100
    assert bar.mark_label == "JAX takes 21.28 GiB" and bar.mark_label in page


def test_a_page_shows_kernels_by_time_variants_and_ways_out():
    plan, _ = line_plan(batch=8192)
    page = render(plan_page([plan], PlanContext(CIFAR), "rapid"))
    assert "Kernels by time" in page and "Ways out" in page and "--config.train.remat=full" in page
    assert ">Cards<" not in page  # there is one


def test_cards_are_compared_in_fit_time_and_money():
    plans = [line_plan(gpu=key, batch=4096, variants=False)[0] for key in ("rtx4090", "h100", "rtx3060")]
    table = cards_table(plans, PlanContext(CIFAR, prices={"rtx4090": 0.5, "h100": 3.0}))
    fits, faster, small = table.rows
    assert fits[4].key < faster[4].key and fits[6].key > faster[6].key
    assert small[1].text == "does not fit" and small[6].key is None and small[7].key is None
    assert fits[7].text != "-"
