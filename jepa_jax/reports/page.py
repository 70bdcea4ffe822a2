"""Renders pages as self-contained HTML files and charts as SVG files."""

import base64
import datetime
import functools
import io
import math
import pathlib
import re
from collections.abc import Sequence
from typing import NamedTuple

import jinja2
import PIL.Image

from jepa_jax.base.files import write_atomically
from jepa_jax.base.text import percent, short
from jepa_jax.reports.glossary import meaning
from jepa_jax.reports.parts import Card, Chart, HeatMap, Image, Page, Part, absent

TEMPLATES = pathlib.Path(__file__).parent / "templates"


def embed_file(path: pathlib.Path, alt: str, style: str = "pixels") -> Part:
    """Returns the picture in a PNG file or the figure in an SVG file.

    With style "pixels" a picture is enlarged by a whole factor while it stays narrow.
    """
    if not path.exists():
        return absent(f"{path.name} has not been written.")
    try:
        image = embed_image(path.read_bytes(), alt, style)
    except (OSError, ValueError):
        return absent(f"{path.name} is not a {path.suffix[1:].upper()} picture.")
    if path.suffix == ".svg":
        return image
    factor = max(1, min(800 // max(image.width, 1), 640 // max(image.height, 1)))
    return image._replace(shown_width=image.width * factor if style == "pixels" else None)


def embed_image(data: bytes, alt: str, style: str = "pixels") -> Image:
    """Returns a picture from the content of its file (PNG, GIF or SVG), at its own size."""
    if data.startswith(b"<svg"):
        size = re.search(rb'width="(\d+)" height="(\d+)"', data)
        if size is None:
            raise ValueError("the figure states no size")
        (width, height), kind = map(int, size.groups()), "svg+xml"
    else:
        with PIL.Image.open(io.BytesIO(data)) as file:
            (width, height), kind = file.size, str(file.format).lower()
    source = f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
    return Image(source, alt, width, height, style, width)


def render(page: Page) -> str:
    """Returns the page as one HTML document, with its style, script and pictures inside."""
    written = datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")
    text = _templates().get_template("page.html").render(page=page, written=written)
    return text.encode("utf-8", "replace").decode()  # a file name that is not UTF-8 holds lone surrogates


class Panel(NamedTuple):
    """A chart or heat map in a file: its place, that of its plot, and those of the names of its series."""

    part: Chart | HeatMap
    x: float
    width: float
    height: float
    left: float = 60
    top: float = 50
    right: float = 0
    bottom: float = 0
    legend: Sequence[tuple[float, float, str]] = ()


def figure_svg(cards: Sequence[Card]) -> str:
    """Returns the charts and heat maps of cards, side by side, as one SVG document with light colours."""
    panels: list[Panel] = []
    for part in [part for card in cards for part in card.parts if isinstance(part, Chart | HeatMap)]:
        x = panels[-1].x + panels[-1].width if panels else 0.0
        panels.append(
            Panel(part, x, part.width, part.height + 36, top=36) if isinstance(part, HeatMap) else _chart_panel(part, x)
        )
    width, height = sum(panel.width for panel in panels), max((panel.height for panel in panels), default=0)
    size = {"width": math.ceil(width), "height": math.ceil(height)}
    text = _templates().get_template("figure.svg").render(panels=panels, **size)
    light = dict(re.findall(r"(--\w+): (#\w+)", (TEMPLATES / "page.css").read_text().partition("@media")[0]))
    return re.sub(r"var\((--\w+)\)", lambda match: light[match[1]], text)


def _chart_panel(part: Chart, x: float) -> Panel:
    """Returns a chart with its legend below, in as many lines as the names need."""
    left, right, bottom = (16, 464, 450) if part.tall else (60, 504, 290)
    places, at, y = [], float(left), bottom + 62
    for name in part.legend:
        length = 30 + 6.6 * len(name)
        if at > left and at + length > right:
            at, y = float(left), y + 20
        places.append((at, y, name))
        at += length
    return Panel(part, x, right + 16, (y if places else bottom + 40) + 16, left, 50, right, bottom, places)


def write_figure(path: str | pathlib.Path, cards: Sequence[Card]) -> None:
    """Writes the charts and heat maps of cards, side by side, as an SVG file."""
    write_atomically(path, figure_svg(cards))


def write_page(path: str | pathlib.Path, page: Page) -> None:
    write_atomically(path, render(page))


@functools.cache
def _templates() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    kind = {"kind": lambda part: type(part).__name__}
    environment.filters |= {"short": short, "percent": percent, "meaning": meaning, **kind}
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    return environment
