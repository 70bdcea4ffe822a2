"""masks.html of a run: the best and worst test fires; and what report.html shows of predicted masks."""

import pathlib
import zipfile
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from jepa_jax.base.files import write_atomically
from jepa_jax.data.pictures import GAP, grid, png
from jepa_jax.projects.wildfire.data.panels import LEGEND, PANELS, element_panels
from jepa_jax.projects.wildfire.reports.animation import spread_gif
from jepa_jax.projects.wildfire.reports.results import COLUMNS, result_rows, result_sentences
from jepa_jax.reports.page import embed_image, write_page
from jepa_jax.reports.parts import Card, Legend, Link, Page, Part, Section, Table, absent
from jepa_jax.reports.run_files import RunFiles

EXHIBITS, PAGE, ANIMATION = "exhibits/next_mask.npz", "masks.html", "exhibits/next_mask.gif"
SIDE, HEADER = 160, 22  # of a panel, and of the line above panels, in pixels
ELEMENT = ("fire", "valid", "static", "target", "known")
Exhibits = Mapping[str, np.ndarray]


def fires_section(run: RunFiles) -> Section | None:
    """Returns figures and the animation, and writes masks.html beside the report; None if a run has no masks."""
    parts: list[Part] = []
    if rows := result_rows(run.summary):
        table = Table(rows, ["", *COLUMNS.values()], marked=[len(rows) - 1], style="figures")
        parts.append(Card("Next masks of the test fires", [table], " ".join(result_sentences(run.summary))))
    if (run.workdir / EXHIBITS).exists():
        parts.append(_exhibition(run))
    return Section("Predicted masks", parts) if parts else None


def _exhibition(run: RunFiles) -> Card:
    title = "A fire, frame by frame"
    try:
        exhibits = read_exhibits(run.workdir / EXHIBITS)
        write_page(run.workdir / PAGE, fires_page(exhibits, run.workdir.resolve().name))
        parts: list[Part] = []
        if "spread_probability" in exhibits:
            gif = spread_gif(exhibits)
            write_atomically(run.workdir / ANIMATION, gif)
            parts += [embed_image(gif, _spread_in_words(exhibits)), Legend(LEGEND)]
    except (OSError, EOFError, zipfile.BadZipFile, ValueError, KeyError, IndexError) as error:
        return Card(title, [absent(f"{EXHIBITS} cannot be shown: {error}")])
    parts.append(Link("The best and the worst fires", PAGE))
    note = "The test fire of median average precision among those with long histories. Each mask is predicted from the"
    return Card(title, parts, f"{note} true masks before it.")


def _spread_in_words(exhibits: Exhibits) -> str:
    predictions, masks = len(exhibits["spread_probability"]), exhibits["spread_masks"]
    return (
        f"Animation of test fire {exhibits['spread_fire_id']} in {predictions} steps: on the left what burns, and the "
        f"predicted probability of what would ignite next; on the right what ignited, by whether it was predicted. "
        f"The fire grows from {masks[0].sum()} to {masks[-1].sum()} pixels."
    )


def read_exhibits(path: pathlib.Path) -> dict[str, np.ndarray]:
    """Returns the arrays of an .npz file."""
    with np.load(path, allow_pickle=False) as stored:
        return dict(stored)


def fires_page(exhibits: Exhibits, name: str) -> Page:
    """Returns the page of the best fires, the best first, and of the worst ones, the worst first."""
    best = np.flatnonzero(exhibits["is_best"])
    worst = np.flatnonzero(~exhibits["is_best"])[::-1]
    explained = (
        "Of each test fire the sequence with the longest history: its last frames, the next mask, the predicted "
        f"probability, and the errors of the mask cut at probability {exhibits['threshold']:.3f}. Grey is the terrain. "
        "Average precision (AP) is that of all sequences of the fire. Nothing was chosen by these figures."
    )
    sections = [
        Section("", [Card("", [explained, Legend(LEGEND), Link("Back to the report", "report.html")])]),
        Section("Best fires", list(_cards(exhibits, best))),
        Section("Worst fires", list(_cards(exhibits, worst)) or [absent("All fires are among the best.")]),
    ]
    return Page(f"{name}: predicted masks", sections, subtitle="Test fires by average precision")


def _cards(exhibits: Exhibits, indices: np.ndarray) -> Iterator[Card]:
    for index in indices:
        frames, fire = int(exhibits["valid"][index].sum()), exhibits["fire_id"][index]
        measured = {
            title: exhibits[key][index] for key, title in list(COLUMNS.items())[:2] if np.isfinite(exhibits[key][index])
        }
        figures = ", ".join(f"{title} {value:.3f}" for title, value in measured.items())
        history = f"history of {frames} frame{'s' * (frames != 1)}"
        alt = f"Fire {fire}: {', '.join(PANELS)}. {figures}."
        yield Card(f"Fire {fire} · {figures} · {history}", [embed_image(fire_strip(exhibits, index), alt)])


def fire_strip(exhibits: Mapping[str, Any], index: int) -> bytes:
    """Returns the panels of one fire side by side, with their names above, as a PNG file."""
    element = {name: array[index][None] for name, array in exhibits.items() if name in ELEMENT}
    probability = exhibits["probability"][index][None].astype(np.float32)
    panels = element_panels(element, probability, float(exhibits["threshold"]))
    factor = max(1, SIDE // panels[0].shape[1])
    enlarged = [np.repeat(np.repeat(panel[0], factor, 0), factor, 1) for panel in panels]
    strip = Image.fromarray(grid([enlarged]))
    canvas = Image.new("RGB", (strip.width, strip.height + HEADER), (255, 255, 255))
    canvas.paste(strip, (0, HEADER))
    draw, step = ImageDraw.Draw(canvas), (strip.width - GAP) / len(panels)
    for i, title in enumerate(PANELS):
        draw.text((GAP + i * step, HEADER / 2 + 2), title, (32, 32, 32), ImageFont.load_default(13), anchor="lm")
    return png(np.asarray(canvas))
