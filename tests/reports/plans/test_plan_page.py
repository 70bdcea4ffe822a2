"""The page of plans: verdict, memory as a bar, the plan as text."""

import pytest

from jepa_jax.planning.plan_text import PlanContext
from jepa_jax.reports.page import render
from jepa_jax.reports.plans.plan_page import memory_bar, plan_page
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
