"""A page with the images of a folder that lie nearest to some of them, by the cosine of their features."""

import io
import pathlib
from collections.abc import Sequence

import numpy as np
import PIL.Image

from jepa_jax.base.errors import UserError
from jepa_jax.base.files import user_path
from jepa_jax.evals.neighbours import nearest
from jepa_jax.exports.embed import Embedded
from jepa_jax.reports.page import embed_image, write_page
from jepa_jax.reports.parts import Card, Image, Page, Section, Table, absent

NEIGHBOURS = 8
TILE, GAP, BREAK = 96, 6, 24  # pixels: an image, between images, behind the first one
SAMPLE = 12  # images that `sample` draws


def write_neighbours(embedded: Embedded, folder: str | pathlib.Path, asked: str) -> pathlib.Path:
    """Writes the page of the images that are asked for (see `queries`) beside the features; returns its path."""
    root, names, page = user_path(folder, "--input"), embedded.names, embedded.output.with_suffix(".html")
    cards = []
    for query in queries(names, asked):
        (near,), (cosines,) = nearest(embedded.features, [query], NEIGHBOURS)
        picture = _strip([root / names[i] for i in (query, *near)], f"{names[query]} and its neighbours")
        rows = [[names[i], f"{cosine:.3f}"] for i, cosine in zip(near, cosines, strict=True)]
        shown = picture or absent("The images cannot be read any more.")
        cards.append(Card(names[query], [shown, Table(rows, ("image", "cosine"))], wide=True))
    subtitle = (
        f"{len(names):,} images, {embedded.features.shape[1]} features each; the first image of a row is the query"
    )
    write_page(page, Page(f"Nearest neighbours in {root.name}", [Section("", cards)], subtitle))
    return page


def queries(names: Sequence[str], asked: str) -> list[int]:
    """Returns the places of the images that neighbours are wanted of: names with commas, or "sample"."""
    if asked == "sample":
        return sorted(np.random.default_rng(0).permutation(len(names))[:SAMPLE].tolist())
    places = {name: i for i, name in enumerate(names)}
    wanted = [name.strip() for name in asked.split(",")]
    if missing := [name for name in wanted if name not in places]:
        raise UserError(f"--neighbours={missing[0]}: no such image; give a path below --input, e.g. {names[0]}")
    return [places[name] for name in wanted]


def _strip(files: Sequence[pathlib.Path], alt: str) -> Image | None:
    """Returns images side by side, the first one apart; None if one cannot be read."""
    strip = PIL.Image.new("RGB", (len(files) * (TILE + GAP) - GAP + BREAK, TILE), "white")
    try:
        for i, file in enumerate(files):
            with PIL.Image.open(file) as stored:
                stored.draft("RGB", (2 * TILE, 2 * TILE))
                picture = stored.convert("RGB")
            picture.thumbnail((TILE, TILE))
            left = i * (TILE + GAP) + (BREAK if i else 0)
            strip.paste(picture, (left + (TILE - picture.width) // 2, (TILE - picture.height) // 2))
    except (OSError, ValueError):
        return None
    out = io.BytesIO()
    strip.save(out, "PNG")
    return embed_image(out.getvalue(), alt, "picture")
