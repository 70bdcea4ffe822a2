"""Predicted frames in reports and terminals: figures by horizon beside their baselines, and an animation."""

import zipfile
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from jepa_jax.base.files import write_atomically
from jepa_jax.base.text import number
from jepa_jax.reports.parts import Card, KeyFigure, Part, Section, Table
from jepa_jax.reports.tables import text_table

if TYPE_CHECKING:
    from jepa_jax.reports.run_files import RunFiles

EXHIBITS, ANIMATION = "exhibits/rollout.npz", "exhibits/rollout.gif"
KNOWN = 2  # frames that a rollout starts from
FIGURES = {"detection_ap": "Detection, average precision", "position_r2": "Position, R²"}
ROWS = {
    "": "predicted",
    "copy_last_": "copy of the last frame",
    "untrained_": "untrained model",
    "encoded_": "true frame",
}
NOTE = (
    "Read from latents: predicted ones; that of the last known frame, for all horizons; those that the model predicted "
    "before its first step; and those of the true frames, which is what the readout can reach. Below 0 is drawn as 0."
)


class RolloutResults:
    """See `jepa_jax.reports.run_files.Results`."""

    charts: Mapping[str, Mapping[str, str]] = {}

    def key_figures(self, run: "RunFiles") -> list[KeyFigure]:
        """Returns the figures of the farthest horizon."""
        shown: list[KeyFigure] = []
        for figure, title in FIGURES.items():
            rows = values_by_horizon(run.summary, figure)
            if known := rows.get("predicted"):
                copied = rows.get("copy of the last frame", [None])[-1]
                note = f"{len(known)} frames ahead" + (
                    "" if copied is None else f", copy of the last frame {copied:.3f}"
                )
                text = "–" if known[-1] is None else f"{known[-1]:.3f}"
                shown.append(KeyFigure(title, text, note, main=not shown))
        return shown

    def section(self, run: "RunFiles") -> Section | None:
        cards = [card for figure in FIGURES if (card := horizon_card(run.summary, figure))]
        if (run.workdir / EXHIBITS).exists():
            cards.append(animation_card(run))
        return Section("Predicted frames", cards) if cards else None

    def summary_lines(self, summary: Mapping[str, Any]) -> list[str]:
        lines = []
        for figure, title in FIGURES.items():
            if rows := values_by_horizon(summary, figure):
                count = max(map(len, rows.values()))
                cells = [[name, *map(_text, values)] for name, values in rows.items()]
                lines += [text_table([[title, *(str(h + 1) for h in range(count))], *cells])]
        return lines


def values_by_horizon(summary: Mapping[str, Any], figure: str) -> dict[str, list[float | None]]:
    """Returns the lists of a figure in summary.json by what they are of; {} if a run predicted nothing."""
    found = {title: summary.get(f"{prefix}{figure}") for prefix, title in ROWS.items()}
    if not isinstance(found["predicted"], list):
        return {}
    return {title: [number(value) for value in values] for title, values in found.items() if isinstance(values, list)}


def horizon_card(summary: Mapping[str, Any], figure: str) -> Card | None:
    """Returns a chart of a figure over the horizon, with its table."""
    from jepa_jax.reports.charts import Series, line_chart

    rows = values_by_horizon(summary, figure)
    if not rows:
        return None
    horizons = range(1, 1 + max(map(len, rows.values())))
    lowest = 0.0  # a regression that is worse than the mean by any amount is drawn as equal to it
    series = [
        Series(name, horizons, [np.nan if value is None else max(value, lowest) for value in values], "both")
        for name, values in rows.items()
    ]
    chart = line_chart(FIGURES[figure], series, x_label="frames ahead", x_ticks=list(horizons), from_zero=True)
    table = Table(
        [[name, *map(_text, values)] for name, values in rows.items()], ["", *map(str, horizons)], style="figures"
    )
    return Card("", [*chart.parts, table], NOTE)


def animation_card(run: "RunFiles") -> Card:
    """Returns the card with the animation of some test sequences, which is also written beside its arrays."""
    from jepa_jax.projects.world_models.reports.animation import rollout_gif
    from jepa_jax.reports.page import embed_image
    from jepa_jax.reports.parts import absent

    title = "Test sequences, and what is read from latents"
    try:
        with np.load(run.workdir / EXHIBITS, allow_pickle=False) as stored:
            rows = {"truth": stored["frames"], "true latents": stored["encoded"], "predicted": stored["predicted"]}
        gif = rollout_gif(rows, KNOWN)
        write_atomically(run.workdir / ANIMATION, gif)
    except (OSError, EOFError, zipfile.BadZipFile, ValueError, KeyError, IndexError) as error:
        return Card(title, [absent(f"{EXHIBITS} cannot be shown: {error}")])
    words = f"Animation of {len(rows['truth'])} test sequences: true frames, and frames decoded from latents."
    part: Part = embed_image(gif, words)
    note = f"The first {KNOWN} frames are known; the others follow from predictions alone. Decoded by a linear readout."
    return Card(title, [part], note, wide=True)


def _text(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
