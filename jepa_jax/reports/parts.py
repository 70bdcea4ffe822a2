"""Pages as data: sections of texts, tables, charts and pictures.

`templates/parts.html` has one macro for each class of parts. No part holds HTML: the templates escape every text.

    page = Page("Title", [Section("Results", [Card("Accuracy", [Table([["probe", 71.3]], ["", "%"])], note="test")])])
    write_page("page.html", page)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jepa_jax.base.text import short


class Section(NamedTuple):
    """Parts under a heading; without a title there is no heading and no link in the navigation."""

    title: str
    parts: Sequence[Part]


class Page(NamedTuple):
    """A whole page; the badge is a coloured word beside the heading, its style "", good, warn or bad.

    `refresh` are the seconds after which a browser loads it again; 0 = never.
    """

    heading: str
    sections: Sequence[Section]
    subtitle: str = ""
    badge: str = ""
    badge_style: str = ""
    refresh: int = 0


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
    """Parts side by side: style "grid" aligns them in rows of two, "columns" fills one column after the other."""

    parts: Sequence[Part]
    style: str = "grid"


class Details(NamedTuple):
    """Parts under a heading that a click folds; folded, they show the preview."""

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


class PictureMaps(NamedTuple):
    """Pictures at the places of their features, larger under the pointer; all maps cut them out of one sheet.

    A place is (percent from the left, percent from the top, number of its class or -1), in the order of the sheet.
    """

    sheet: str  # a data URL
    tiles: tuple[int, int]  # columns and rows of the sheet
    maps: Mapping[str, Sequence[tuple[float, float, int]]]  # by title
    classes: Sequence[str] = ()


class Link(NamedTuple):
    """A link to a file beside the page."""

    text: str
    target: str


class Legend(NamedTuple):
    """Explains colours (red, green, blue)."""

    meanings: Mapping[tuple[int, int, int], str]


class Cell(NamedTuple):
    """A text and what it is sorted by; None sorts last in both directions."""

    text: str
    key: Any
    style: str = ""


class Table(NamedTuple):
    """Rows of values or `Cell`s; numbers are aligned right, `marked` rows (by index) stand out.

    A click on a heading sorts the rows of a sortable table, all of whose cells are `Cell`s.
    """

    rows: Sequence[Sequence[Any]]
    header: Sequence[str] = ()
    marked: Sequence[int] = ()
    style: str = ""
    sortable: bool = False

    def is_numeric(self, column: int) -> bool:
        """Returns whether a column of a sortable table has a number to sort by."""
        return any(isinstance(row[column].key, int | float) for row in self.rows)


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
    labels: Sequence[tuple[float, float, str]]  # place of a point in percent from the left and the top, text


class Chart(NamedTuple):
    """A laid-out chart of lines and dots (see charts.py); `data` is what page.js reads."""

    title: str
    x_label: str
    y_label: str
    layers: Sequence[Layer]
    x_ticks: Sequence[Label]
    bad_marks: Sequence[float]
    colours: Sequence[str]  # of each series
    legend: Sequence[str]
    notes: Sequence[str]
    starts_log: bool
    data: Mapping[str, Any]
    tall: bool = False


class MapLabel(NamedTuple):
    """A text beside a heat map, turned by an angle in degrees; the anchor is "", middle or end."""

    x: float
    y: float
    text: str
    anchor: str = ""
    angle: float = 0


class HeatMap(NamedTuple):
    """A laid-out table (see charts.py) whose cells are shaded from 0 to 1; the marked cell is framed."""

    title: str
    width: float
    height: float
    frame: tuple[float, float, float, float]  # left, top, right, bottom
    cell: tuple[float, float]  # width, height
    cells: Sequence[tuple[float, float, float, str]]  # left, top, shade, text; empty cells are left out
    labels: Sequence[MapLabel]
    marked: tuple[float, float] | None = None  # left, top


Part = (
    str
    | Text
    | Card
    | Grid
    | Details
    | KeyFigures
    | Image
    | PictureMaps
    | Link
    | Legend
    | Table
    | Bars
    | StackedBars
    | Chart
    | HeatMap
)


def absent(text: str) -> Text:
    return Text(text, "absent")


def absent_section(title: str, text: str) -> Section:
    return Section(title, [Card("", [absent(text)])])


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
