"""Pages as data, and the templates that turn them into self-contained HTML files."""

import base64
import datetime
import functools
import io
import pathlib
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import jinja2
import PIL.Image

from jepa_jax.base.files import write_atomically
from jepa_jax.base.text import percent, short
from jepa_jax.reports.parts import Card, Image, Part, absent

LARGEST_IMAGE = 700_000  # bytes; a larger picture is embedded as JPEG


class PageSection(NamedTuple):
    """Parts under a heading; without a title there is no heading and no link in the navigation."""

    title: str
    parts: Sequence[Part]


class Page(NamedTuple):
    """A whole page; the badge is a coloured word beside the heading, its style "", good, warn or bad."""

    heading: str
    sections: Sequence[PageSection]
    subtitle: str = ""
    badge: str = ""
    badge_style: str = ""


def absent_section(title: str, text: str) -> PageSection:
    """Returns a section that only says what is missing."""
    return PageSection(title, [Card("", [absent(text)])])


def embed_png(path: pathlib.Path, alt: str, style: str = "pixels") -> Part:
    """Returns the picture in a PNG file; with style "pixels", enlarged by a whole factor while it stays narrow."""
    try:
        data = path.read_bytes()
    except OSError:
        return absent(f"{path.name} has not been written.")
    if data[:8] != b"\x89PNG\r\n\x1a\n" or len(data) < 24:
        return absent(f"{path.name} is not a PNG picture.")
    width, height = struct.unpack(">II", data[16:24])
    kind = "png"
    if len(data) > LARGEST_IMAGE:
        data, kind = _as_jpeg(data), "jpeg"
    source = _data_url(data, kind)
    factor = max(1, min(800 // max(width, 1), 640 // max(height, 1)))
    return Image(source, alt, width, height, style, width * factor if style == "pixels" else None)


def embed_image(data: bytes, kind: str, alt: str, style: str = "pixels") -> Image:
    """Returns a picture from the content of its file, at its own size; `kind` is png or gif."""
    with PIL.Image.open(io.BytesIO(data)) as file:
        width, height = file.size
    return Image(_data_url(data, kind), alt, width, height, style, width)


def _data_url(data: bytes, kind: str) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def _as_jpeg(png: bytes) -> bytes:
    out = io.BytesIO()
    with PIL.Image.open(io.BytesIO(png)) as file:
        picture = file.convert("RGB")
    picture.thumbnail((1600, 1600))
    picture.save(out, "JPEG", quality=85)
    return out.getvalue()


def render(page: Page) -> str:
    """Returns the page as one HTML document, with its style, script and pictures inside."""
    written = datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")
    text = _templates().get_template("page.html").render(page=page, written=written)
    return text.encode("utf-8", "replace").decode()  # a file name that is not UTF-8 holds lone surrogates


def render_parts(parts: Sequence[Part]) -> str:
    """Returns the HTML of parts alone, without a page around them."""
    module: Any = _templates().get_template("parts.html").module
    return str(module.show(parts))


def write_page(path: str | pathlib.Path, page: Page) -> None:
    write_atomically(path, render(page))


@functools.cache
def _templates() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(pathlib.Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"short": short, "percent": percent, "kind": lambda part: type(part).__name__}
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    return environment
