"""Pages: every text is escaped, nothing is fetched, every part has a macro."""

import typing
import xml.etree.ElementTree

import jinja2
import numpy as np
import PIL.Image
import pytest

from jepa_jax.profiling.metrics import LABELS
from jepa_jax.reports import parts
from jepa_jax.reports.charts import Series, heat_map, line_chart, scatter_chart
from jepa_jax.reports.page import _templates, embed_file, figure_svg, render, write_figure
from jepa_jax.reports.parts import Card, Grid, Page, Section, Text

HOSTILE = """<script>alert("x")</script>'&</title>"""


def hostile_parts():
    """One part of each class, with hostile text in every place for text."""
    chart = line_chart(
        HOSTILE, [Series(HOSTILE, [1, 2], [3, float("nan")], labels=[HOSTILE]), Series(HOSTILE, [1], [2])],
        x_label=HOSTILE, y_label=HOSTILE, levels=[(HOSTILE, 1.0)], per_x=(HOSTILE, 2.0),
    )  # fmt: skip
    piece = parts.Piece(HOSTILE, 10.0, HOSTILE)
    return [
        HOSTILE,
        Text(HOSTILE, HOSTILE, HOSTILE),
        Card(HOSTILE, [HOSTILE], HOSTILE),
        Grid([HOSTILE], HOSTILE),
        parts.Details(HOSTILE, [HOSTILE], HOSTILE),
        parts.KeyFigures([parts.KeyFigure(HOSTILE, HOSTILE, HOSTILE)]),
        parts.Image(HOSTILE, HOSTILE, 1, 1, HOSTILE, 1),
        parts.PictureMaps("data:,", (1, 1), {HOSTILE: [(1.0, 2.0, 0)]}, [HOSTILE]),
        parts.Link(HOSTILE, HOSTILE),
        parts.Legend({(1, 2, 3): HOSTILE}),
        parts.Table([[HOSTILE, None, 1.5, True]], [HOSTILE], [0], HOSTILE),
        parts.Table([[parts.Cell(HOSTILE, HOSTILE, HOSTILE)]], [HOSTILE], [0], sortable=True),
        parts.Bars({HOSTILE: [parts.Bar(HOSTILE, 150.0, HOSTILE, HOSTILE), parts.Bar(HOSTILE, None)]}),
        parts.StackedBars([parts.StackedBar([piece], HOSTILE, HOSTILE, 50.0, 20.0)], {HOSTILE: HOSTILE}),
        *chart.parts,
        *heat_map(HOSTILE, [[1.0]], [HOSTILE], [HOSTILE], x_label=HOSTILE, y_label=HOSTILE, text=HOSTILE).parts,
    ]


def test_hostile_text_is_escaped_in_every_part():
    every = hostile_parts()
    assert {type(part) for part in every} == set(typing.get_args(parts.Part))
    plain = render(Page("page", [Section("section", ["text"])]))
    page = render(Page(HOSTILE, [Section(HOSTILE, every)], HOSTILE, HOSTILE, HOSTILE))
    assert "alert" in page and "<script>alert" not in page and "'&<" not in page
    assert page.count("<script>") == plain.count("<script>") == 1
    assert page.count("</title>") == 1
    assert page.count("</script>") == page.count("<script")


def test_a_figure_in_a_file_is_one_svg_without_variables_or_hostile_tags(tmp_path):
    cards = [
        line_chart("Loss", [Series(HOSTILE, [1, 2], [3, 4]), Series("b" * 80, [1], [2])], log="first"),
        heat_map(HOSTILE, np.eye(3), ["a", "b", "c"], ["a", "b", "c"], marked=(1, 2)),
        scatter_chart("PCA", np.zeros((4, 2))),
    ]
    figure = figure_svg(cards)
    root = xml.etree.ElementTree.fromstring(figure)
    assert len([child for child in root if child.tag.endswith("}svg")]) == 3
    assert "<script" not in figure and "var(" not in figure and ">Loss<" in figure
    write_figure(tmp_path / "a.svg", cards)
    picture = embed_file(tmp_path / "a.svg", "three")
    assert picture.source.startswith("data:image/svg+xml;base64,") and picture.width == float(root.get("width"))
    assert embed_file(tmp_path / "b.svg", "none") == parts.absent("b.svg has not been written.")
    assert "<svg" in figure_svg([line_chart("no values", [])])


def test_a_page_asks_for_nothing_outside_itself():
    page = render(Page("page", [Section("section", ["text"])]))
    assert "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'" in page
    for word in ("http:", "https:", "@import", "url(", "fetch(", "<iframe"):
        assert word not in page
    assert page.startswith("<!doctype html>")


def test_a_name_that_is_not_utf8_can_be_written():
    assert "a?b" in render(Page("a\udcffb", []))


def test_an_unknown_value_is_an_error():
    with pytest.raises(jinja2.UndefinedError):
        _templates().from_string("{{ page.missing }}").render(page=Page("page", []))


def test_sections_without_a_title_are_not_in_the_navigation():
    page = render(Page("page", [Section("", ["one"]), Section("Two", ["two"])]))
    assert page.count("<a href=") == 1 and '<a href="#part2">Two</a>' in page and '<section id="part2">' in page


def test_a_card_that_would_be_alone_fills_its_row():
    one, wide = Card("one", []), Card("wide", [], wide=True)
    assert [card.wide for card in parts.card_grid([one, one]).parts] == [False, False]
    assert [card.wide for card in parts.card_grid([wide, one, None]).parts] == [True, True]
    assert parts.card_grid([]).parts == []


def test_every_section_of_a_run_has_a_colour():
    style = _templates().get_template("page.css").render()
    assert [name for name in LABELS if f"i.{name} {{" not in style] == []


def test_cells_are_aligned_by_kind():
    html = render(Page("", [Section("", [parts.Table([["name", 12345, None, True]])])]))
    assert '<td>name</td><td class="num">12,345</td><td>–</td><td>True</td>' in html


def test_a_small_picture_is_enlarged_and_something_else_is_no_picture(tmp_path):
    PIL.Image.fromarray(np.zeros((90, 100, 3), np.uint8)).save(tmp_path / "small.png")
    picture = embed_file(tmp_path / "small.png", "small")
    assert picture.source.startswith("data:image/png") and (picture.width, picture.shown_width) == (100, 700)
    (tmp_path / "text.png").write_text("no picture")
    assert embed_file(tmp_path / "text.png", "text") == parts.absent("text.png is not a PNG picture.")
