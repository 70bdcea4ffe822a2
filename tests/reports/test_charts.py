"""Charts: well-formed for any values, thinned out without losing extremes, with few round ticks."""

import re
import xml.etree.ElementTree

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jepa_jax.reports import charts
from jepa_jax.reports.charts import Series, heat_map, line_chart, scatter_chart
from jepa_jax.reports.page import render
from jepa_jax.reports.parts import Page, Section


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 10**9), st.floats()), max_size=40),
    st.sampled_from(["line", "dots", "both", "points"]),
    st.booleans(),
    st.lists(st.floats(-1e6, 1e6), max_size=2),
)
def test_any_values_make_a_well_formed_chart(points, style, x_log, levels):
    series = [Series("a<b", [x for x, _ in points], [y for _, y in points], style)]
    named = [("level", value) for value in levels]
    chart = line_chart("t", series, log="offer", x_log=x_log, levels=named, smooth=True)
    page = render(Page("", [Section("", [chart])]))
    card = page[page.index('<div class="card') : page.index("</section>")]
    xml.etree.ElementTree.fromstring(card)
    numbers = re.findall(r'(?: d|style)="([^"]*)"', card)
    assert not any(re.search("nan|inf", text) for text in numbers)


@settings(max_examples=40)
@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=3000), st.integers(4, 200))
def test_decimation_keeps_ends_and_extremes_in_order(values, limit):
    x, y = np.arange(len(values), dtype=float), np.array(values)
    few_x, few_y = charts.decimate(x, y, limit)
    assert len(few_x) <= limit and (np.diff(few_x) > 0).all()
    assert (few_x[0], few_x[-1]) == (x[0], x[-1])
    assert few_y.min() == y.min() and few_y.max() == y.max()
    np.testing.assert_array_equal(few_y, y[few_x.astype(int)])


@settings(max_examples=60)
@given(st.floats(-1e12, 1e12), st.floats(1e-9, 1e12))
def test_ticks_are_few_and_inside(low, width):
    high = low + max(width, abs(low) * 1e-6)
    marks = charts.ticks(low, high)
    slack = 1e-6 * (high - low)
    assert 2 <= len(marks) <= 7 and low - slack <= marks[0] and marks[-1] <= high + slack


def test_a_value_that_is_not_finite_breaks_the_line():
    chart = line_chart("t", [Series("a", [0, 1, 2, 3, 4], [1, 1, np.nan, 1, 1])]).parts[0]
    style, _, path = chart.layers[0].paths[0]
    assert style == "both" and re.findall("[ML]", path) == ["M", "L", "M", "L"]
    assert chart.notes == ["a: 1 non-finite values, marked in red."] and chart.bad_marks == [500.0]


def test_long_series_are_faint_under_their_running_mean():
    chart = line_chart("t", [Series("a", range(400), [1.0] * 400)], smooth=True).parts[0]
    assert [style for style, _, _ in chart.layers[0].paths] == ["raw", "line"]
    assert chart.notes == ["Bold: running mean over 10 values."]


def test_a_logarithm_is_offered_only_without_negative_values():
    assert [layer.name for layer in line_chart("t", [Series("a", [0, 1], [1, 2])], log="first").parts[0].layers] == [
        "lin",
        "log",
    ]
    assert len(line_chart("t", [Series("a", [0, 1], [-1, 2])], log="first").parts[0].layers) == 1


def test_intervals_are_drawn_where_there_are_any_and_the_axis_holds_them():
    series = Series("a", [1, 2], [10, 20], intervals=[(8, 50), None])
    layer = line_chart("t", [series], x_ticks=[1, 2]).parts[0].layers[0]
    assert [style for style, _, _ in layer.paths].count("interval") == 1
    assert "40" in [text for _, text in layer.ticks]


def test_labels_stand_at_their_points():
    chart = line_chart("t", [Series("a", [0, 5, 10], [0, 1, 2], "dots", labels=["first", "middle", "last"])]).parts[0]
    assert [(round(x), text) for x, _, text in chart.layers[0].labels] == [(0, "first"), (50, "middle"), (100, "last")]


def test_a_scatter_plot_has_every_point_in_the_colour_of_its_class():
    labels = np.arange(3000) % 12
    chart = scatter_chart("t", np.random.default_rng(0).normal(size=(3000, 2)), labels, [str(i) for i in range(12)])
    paths = chart.parts[0].layers[0].paths
    counts = [(style, series, path.count("M")) for style, series, path in paths]
    assert counts == [("points", i, 250) for i in range(12)]
    assert len(set(chart.parts[0].colours)) == 12 and chart.parts[0].x_ticks == []
    many = scatter_chart("t", np.zeros((30, 2)), np.arange(30), [str(i) for i in range(30)])
    assert many.parts[0].legend == []
    assert len(scatter_chart("t", np.zeros((3, 2))).parts[0].layers[0].paths) == 1


def test_a_heat_map_shades_between_its_limits_and_names_few_classes():
    names = ["cat", "dog"]
    drawn = heat_map("t", [[100, 0], [25, 75]], names, names, limits=(0, 100), least=0.5, marked=(1, 0)).parts[0]
    assert [(shade, text) for _, _, shade, text in drawn.cells] == [(1.0, "100"), (0.25, "25"), (0.75, "75")]
    assert [label.text for label in drawn.labels][:4] == [*names, *names]
    assert drawn.marked == drawn.cells[1][:2]
    large = heat_map("t", np.eye(50), ["x"] * 50, ["x"] * 50, x_label="predicted", y_label="true").parts[0]
    assert [label.text for label in large.labels] == ["predicted", "true"] and len(large.cells) == 50
