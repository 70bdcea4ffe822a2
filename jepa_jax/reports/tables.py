"""Tables: of rows and declared columns for pages, in Markdown files and in a terminal."""

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jepa_jax.reports.parts import Cell, Table


class Column(NamedTuple):
    """A column of a table: its value in a row, and how a known value is written."""

    value: Callable[[Any], Any]
    show: Callable[[Any], str] = str


def table_cells(rows: Sequence[Any], columns: Mapping[str, Column]) -> dict[str, list[Cell]]:
    """Returns column -> cells; columns that no row fills are left out."""
    found = {}
    for name, column in columns.items():
        values = [column.value(row) for row in rows]
        if any(value not in (None, "") for value in values):
            found[name] = [Cell("–" if value is None else column.show(value), value) for value in values]
    return found


def cells_table(cells: Mapping[str, Sequence[Cell]], marked: Sequence[int] = ()) -> Table:
    """Returns a table that a click on a heading sorts."""
    return Table(list(zip(*cells.values(), strict=True)), list(cells), marked, sortable=True)


def cells_markdown(cells: Mapping[str, Sequence[Cell]]) -> str:
    """Returns a Markdown table in which numbers are aligned right."""
    table = cells_table(cells)
    right = [name for i, name in enumerate(cells) if table.is_numeric(i)]
    return markdown_table(list(cells), [[cell.text for cell in row] for row in table.rows], right)


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]], right: Container[str] = ()) -> str:
    """Returns a Markdown table; the columns whose names are in `right` are aligned right."""
    lines = [header, ["---:" if name in right else "---" for name in header], *rows]
    escaped = [[cell.replace("|", "\\|").replace("\n", " ") for cell in line] for line in lines]
    return "".join("| " + " | ".join(line) + " |\n" for line in escaped)


def text_table(rows: Sequence[Sequence[str]], widest: int = 48) -> str:
    """Returns a table for a terminal: the first column aligned left, the others right; long cells are cut."""
    cut = [[cell[:widest] for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cut, strict=True)]
    lines = []
    for first, *others in cut:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *cells]))
    return "\n".join(lines)
