"""Tables as text: in Markdown files and in a terminal."""

from collections.abc import Container, Iterable, Sequence


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]], right: Container[str] = ()) -> str:
    """Returns a Markdown table; the columns whose names are in `right` are aligned right."""
    lines = [header, ["---:" if name in right else "---" for name in header], *rows]
    return "".join("| " + " | ".join(map(_markdown_cell, line)) + " |\n" for line in lines)


def _markdown_cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def text_table(rows: Sequence[Sequence[str]], widest: int = 48) -> str:
    """Returns a table for a terminal: the first column aligned left, the others right; long cells are cut."""
    cut = [[cell[:widest] for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cut, strict=True)]
    lines = []
    for first, *others in cut:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *cells]))
    return "\n".join(lines)
