"""A page with the images of a folder that lie nearest to some of them, and a map of many, by their features."""

import pathlib
from collections.abc import Sequence

import numpy as np
import PIL.Image
import PIL.ImageOps

from jepa_jax.base.errors import UserError
from jepa_jax.base.files import user_path
from jepa_jax.data.contract import sample
from jepa_jax.evals.neighbours import MAPPED, PIXELS, nearest, pca
from jepa_jax.exports.embed import Embedded
from jepa_jax.reports.page import write_page
from jepa_jax.reports.parts import Card, Page, Part, Section, Table, Text, absent
from jepa_jax.reports.pictures import MAP_NOTE, feature_maps, neighbour_rows

NEIGHBOURS = 8
TILE = 96  # pixels of an image in a row
SAMPLE = 12  # images that `sample` draws
FEWEST = 10  # images of a map
UNREADABLE = absent("The images cannot be read any more.")


def write_neighbours(embedded: Embedded, folder: str | pathlib.Path, asked: str) -> pathlib.Path:
    """Writes the page of the images that are asked for (see `queries`) beside the features; returns its path."""
    root, names, page = user_path(folder, "--input"), embedded.names, embedded.output.with_suffix(".html")
    cards: list[Part] = []
    for query in queries(names, asked):
        (near,), (cosines,) = nearest(embedded.features, [query], NEIGHBOURS)
        pictures = [read_small(root / names[i], TILE) for i in (query, *near)]
        readable = [picture for picture in pictures if picture is not None]
        shown = neighbour_rows([readable], f"{names[query]} and its neighbours") if len(readable) > 1 else UNREADABLE
        rows = [[names[i], f"{cosine:.3f}"] for i, cosine in zip(near, cosines, strict=True)]
        cards.append(Card(names[query], [shown, Table(rows, ("image", "cosine"))], wide=True))
    subtitle = (
        f"{len(names):,} images, {embedded.features.shape[1]} features each; the first image of a row is the query"
    )
    sections = [Section("Map", folder_map(embedded, root)), Section("Neighbours", cards)]
    write_page(page, Page(f"Nearest neighbours in {root.name}", sections, subtitle))
    return page


def folder_map(embedded: Embedded, root: pathlib.Path) -> list[Part]:
    """Returns a map of a sample of the images, framed in the colour of their folder; nothing of very few."""
    places = [(i, read_small(root / embedded.names[i], PIXELS)) for i in sample(len(embedded.names), MAPPED)]
    shown = [(int(i), picture) for i, picture in places if picture is not None]
    if len(shown) < FEWEST:
        return []
    folders = [embedded.names[i].rpartition("/")[0] for i, _ in shown]
    classes = sorted(set(folders))
    labels = np.array([classes.index(one) for one in folders]) if len(classes) > 1 else None
    coordinates = pca(embedded.features)[0][[i for i, _ in shown]]
    maps = feature_maps(np.stack([picture for _, picture in shown]), {"PCA": coordinates}, labels, classes)
    return [Text(MAP_NOTE, "sub"), maps]


def queries(names: Sequence[str], asked: str) -> list[int]:
    """Returns the places of the images that neighbours are wanted of: names with commas, or "sample"."""
    if asked == "sample":
        return sorted(np.random.default_rng(0).permutation(len(names))[:SAMPLE].tolist())
    places = {name: i for i, name in enumerate(names)}
    wanted = [name.strip() for name in asked.split(",")]
    if missing := [name for name in wanted if name not in places]:
        raise UserError(f"--neighbours={missing[0]}: no such image; give a path below --input, e.g. {names[0]}")
    return [places[name] for name in wanted]


def read_small(file: pathlib.Path, side: int) -> np.ndarray | None:
    """Returns a small square copy of an image file on white, uint8 [side, side, 3]; None if it cannot be read."""
    try:
        with PIL.Image.open(file) as stored:
            stored.draft("RGB", (2 * side, 2 * side))
            return np.asarray(PIL.ImageOps.pad(stored.convert("RGB"), (side, side), color="white"))
    except (OSError, ValueError):
        return None
