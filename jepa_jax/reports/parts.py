"""The parts that pages are made of, as data; `templates/parts.html` has one macro for each class.

No part holds HTML: the templates escape every text they show.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jepa_jax.base.text import short


class Text(NamedTuple):
    """A paragraph with a style (absent, sub, lead, good, warn, bad, preformatted) and an optional bold label."""

    text: str
    style: str = ""
    label: str = ""


class Card(NamedTuple):
    """A framed box; a wide one fills its row of a grid."""

    title: str
    parts: Sequence[Part]
    note: str = ""
    wide: bool = False


class Grid(NamedTuple):
    """Parts side by side: style "grid" aligns them in rows of two, "columns" flows like a newspaper."""

    parts: Sequence[Part]
    style: str = "grid"


class Details(NamedTuple):
    """Parts that can be folded away; the preview is shown while they are."""

    title: str
    parts: Sequence[Part]
    preview: str = ""


class KeyFigure(NamedTuple):
    label: str
    value: str
    note: str = ""
    main: bool = False


class KeyFigures(NamedTuple):
    """Numbers in large type, side by side; the main one is coloured."""

    figures: Sequence[KeyFigure]


class Image(NamedTuple):
    """An embedded picture (a data URL); style "pixels" keeps enlarged pixels sharp, "picture" fits the card."""

    source: str
    alt: str
    width: int
    height: int
    style: str
    shown_width: int | None = None


class Link(NamedTuple):
    """A link to a file beside the page."""

    text: str
    target: str


class Legend(NamedTuple):
    """What colours (red, green, blue) mean."""

    meanings: Mapping[tuple[int, int, int], str]


class Table(NamedTuple):
    """Rows of cells; numbers are aligned right, `marked` rows (by index) stand out."""

    rows: Sequence[Sequence[Any]]
    header: Sequence[str] = ()
    marked: Sequence[int] = ()
    style: str = ""


class Cell(NamedTuple):
    """A text and what it is sorted by; None sorts last in both directions."""

    text: str
    key: Any
    style: str = ""


class SortableTable(NamedTuple):
    """A table that a click on a heading sorts; `columns` maps names to whether they hold numbers."""

    columns: Mapping[str, bool]
    rows: Sequence[Sequence[Cell]]
    marked: int | None = None


class Bar(NamedTuple):
    """A percentage; the style (main, run or baseline) is its colour."""

    label: str
    value: float | None
    style: str = ""
    note: str = ""


class Bars(NamedTuple):
    """Horizontal bars under the heading of their group; empty groups are left out."""

    groups: Mapping[str, Sequence[Bar]]


class Piece(NamedTuple):
    """A piece of a stacked bar: its colour (a class of page.css), its share, and the text under the pointer."""

    style: str
    percent: float
    title: str


class StackedBar(NamedTuple):
    """A bar divided into pieces; `width` is in percent of the longest bar, `mark` where a labelled line crosses it."""

    pieces: Sequence[Piece]
    label: str = ""
    value: str = ""
    width: float = 100.0
    mark: float | None = None
    mark_label: str = ""


class StackedBars(NamedTuple):
    """Divided bars above a legend (style -> label)."""

    bars: Sequence[StackedBar]
    legend: Mapping[str, str]


Label = tuple[float, str]  # place along an axis in percent from the top or the left, text


class Layer(NamedTuple):
    """A chart drawn with one kind of y axis, "lin" or "log"."""

    name: str
    ticks: Sequence[Label]
    levels: Sequence[Label]
    paths: Sequence[tuple[str, int, str]]  # style, series, the attribute `d` of an SVG path


class Chart(NamedTuple):
    """A laid-out line chart (see charts.py); `data` is what page.js reads."""

    title: str
    x_label: str
    y_label: str
    layers: Sequence[Layer]
    x_ticks: Sequence[Label]
    bad_marks: Sequence[float]
    legend: Sequence[str]
    notes: Sequence[str]
    starts_log: bool
    data: Mapping[str, Any]


Part = (
    str
    | Text
    | Card
    | Grid
    | Details
    | KeyFigures
    | Image
    | Link
    | Legend
    | Table
    | SortableTable
    | Bars
    | StackedBars
    | Chart
)


def absent(text: str) -> Text:
    """Returns a sentence that says what is missing."""
    return Text(text, "absent")


def card_grid(cards: Iterable[Card | None]) -> Grid:
    """Returns cards in rows of two; a card that would be alone in the last row fills it."""
    shown = [card for card in cards if card is not None]
    if sum(not card.wide for card in shown) % 2:
        shown[-1] = shown[-1]._replace(wide=True)
    return Grid(shown)


def pairs(rows: Iterable[Sequence[Any]]) -> Table:
    """Returns a table of names and values without a header; floats are shortened."""
    return Table(
        [[name, short(value) if isinstance(value, float) else str(value)] for name, value in rows], style="pairs"
    )
