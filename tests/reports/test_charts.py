"""Charts: well-formed for any values, thinned out without losing extremes, with few round ticks."""

import re
import xml.etree.ElementTree

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jepa_jax.reports import charts


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 10**9), st.floats()), max_size=40),
    st.sampled_from(["line", "dots", "both"]),
    st.booleans(),
    st.lists(st.floats(-1e6, 1e6), max_size=2),
)
def test_any_values_make_a_well_formed_chart(points, style, x_log, levels):
    series = [charts.Series("a<b", [x for x, _ in points], [y for _, y in points], style)]
    named = [("level", value) for value in levels]
    card = charts.line_chart("t", series, log="offer", x_log=x_log, levels=named, smooth=True)
    xml.etree.ElementTree.fromstring(card.replace("<p class=note>", "<p>"))
    numbers = re.findall(r'(?: d|style)="([^"]*)"', card)
    assert not any(re.search("nan|inf", text) for text in numbers)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=3000), st.integers(4, 200))
def test_decimation_keeps_ends_and_extremes_in_order(values, limit):
    x, y = np.arange(len(values), dtype=float), np.array(values)
    few_x, few_y = charts.decimate(x, y, limit)
    assert len(few_x) <= limit and (np.diff(few_x) > 0).all()
    assert (few_x[0], few_x[-1]) == (x[0], x[-1])
    assert few_y.min() == y.min() and few_y.max() == y.max()
    np.testing.assert_array_equal(few_y, y[few_x.astype(int)])


@settings(deadline=None, max_examples=60)
@given(st.floats(-1e12, 1e12), st.floats(1e-9, 1e12))
def test_ticks_are_few_and_inside(low, width):
    high = low + max(width, abs(low) * 1e-6)
    marks = charts.ticks(low, high)
    slack = 1e-6 * (high - low)
    assert 2 <= len(marks) <= 7 and low - slack <= marks[0] and marks[-1] <= high + slack
