"""Intervals: published values and limits."""

import pytest

from jepa_jax.base.intervals import accuracy_interval, student_quantile


@pytest.mark.parametrize(
    "right, images, low, high",
    [(0, 10, 0.0, 27.75), (10, 10, 72.25, 100.0), (50, 100, 40.38, 59.62), (81, 263, 25.53, 36.62)],
)
def test_accuracies_have_wilsons_interval(right, images, low, high):
    """The last case is example 81/263 of Newcombe, 1998."""
    assert accuracy_interval(100 * right / images, images) == pytest.approx((low, high), abs=0.006)


def test_students_quantiles():
    assert [student_quantile(n) for n in (1, 3, 10)] == pytest.approx([12.706, 3.182, 2.228], abs=5e-4)
