"""What report.html shows of a world model: success, errors by horizon, energies, paths and decoded predictions."""

import pathlib
import zipfile
from collections.abc import Mapping

import numpy as np

from jepa_jax.base.files import write_atomically
from jepa_jax.base.statistics import accuracy_interval
from jepa_jax.projects.world_models.reports.drawings import LEGEND, energy_picture, episode_picture, rollout_gif
from jepa_jax.projects.world_models.reports.results import errors_by_horizon, sentences, success_rows
from jepa_jax.reports.charts import Series, line_chart
from jepa_jax.reports.page import embed_image
from jepa_jax.reports.parts import Card, Grid, Legend, Part, Section, Table, absent
from jepa_jax.reports.run_files import RunFiles

CONTROL, PREDICTION, ANIMATION = (
    "exhibits/control_success.npz",
    "exhibits/predicted_states.npz",
    "exhibits/predicted_states.gif",
)
BINS = 5  # of the distance of tasks
SHOWN = 4  # best and worst episodes


def world_model_section(run: RunFiles) -> Section | None:
    """Returns figures, charts and pictures; None if a run has none of them."""
    parts: list[Part] = []
    if rows := success_rows(run.summary):
        table = Table(rows, ["", "success, %"], marked=[len(rows) - 1], style="figures")
        parts.append(Card("Success on held-out tasks", [table], " ".join(sentences(run.summary))))
    if errors := errors_by_horizon(run.summary):
        series = [Series(name, range(1, len(own) + 1), own, "both") for name, own in errors.items()]
        parts.append(line_chart("Error of positions", series, x_label="steps ahead", from_zero=True))
    for path, cards in ((CONTROL, control_cards), (PREDICTION, prediction_cards)):
        if (run.workdir / path).exists():
            try:
                with np.load(run.workdir / path, allow_pickle=False) as stored:
                    parts += cards(dict(stored), run.workdir)
            except (OSError, EOFError, zipfile.BadZipFile, ValueError, KeyError, IndexError) as error:
                parts.append(Card("Pictures", [absent(f"{path} cannot be shown: {error}")]))
    return Section("World model", [Grid(parts)]) if parts else None


def control_cards(exhibits: Mapping[str, np.ndarray], workdir: pathlib.Path) -> list[Card]:
    """Returns success by distance, maps of energies, and the best and worst episodes."""
    del workdir
    ends = np.linalg.norm(exhibits["paths"][:, -1] - exhibits["goals"], axis=-1)
    walked = np.linalg.norm(np.diff(exhibits["paths"], axis=1), axis=-1).sum(1)
    order = np.lexsort((walked / exhibits["shortest"], ~exhibits["successes"]))
    worst = np.argsort(-ends)[:SHOWN]
    maps = [embed_image(energy_picture(exhibits, i), f"Energies of task {i}") for i in range(len(exhibits["energies"]))]
    return [
        success_by_distance(exhibits["shortest"], exhibits["successes"]),
        Card(
            "Energy of all positions", [Grid(maps, "columns")],
            "Squared distance of the latent of each position to that of the goal (red): light is near, dark is far. "
            "Walls are grey, the white line is the path from the start (green).",
        ),
        _episodes("Best episodes", exhibits, order[:SHOWN], "Successes with the shortest ways."),
        _episodes("Worst episodes", exhibits, worst, "Those that end farthest from the goal."),
    ]  # fmt: skip


def _episodes(title: str, exhibits: Mapping[str, np.ndarray], indices: np.ndarray, note: str) -> Card:
    pictures = [embed_image(episode_picture(exhibits, i), f"Path of episode {i}") for i in indices]
    meanings = {colour: name for colour, name in LEGEND.items() if "planned" in exhibits or "plan" not in name}
    return Card(title, [Grid(pictures, "columns"), Legend(meanings)], note)


def success_by_distance(shortest: np.ndarray, successes: np.ndarray) -> Card:
    """Returns a chart of the success rate in fifths of the tasks by their shortest way, with 95 % intervals."""
    order = np.argsort(shortest)
    groups = [group for group in np.array_split(order, BINS) if len(group)]
    rates = [100 * float(successes[group].mean()) for group in groups]
    intervals = [accuracy_interval(rate, len(group)) for rate, group in zip(rates, groups, strict=True)]
    centres = [float(np.median(shortest[group])) for group in groups]
    series = Series("success", centres, rates, "both", intervals=intervals)
    return line_chart(
        "Success by length of the shortest way",
        [series],
        x_label="length",
        y_label="%",
        levels=[("", 100.0)],
        from_zero=True,
    )


def prediction_cards(exhibits: Mapping[str, np.ndarray], workdir: pathlib.Path) -> list[Card]:
    """Returns an animation of decoded predictions, which is also written beside the report."""
    gif = rollout_gif(exhibits["frames"], exhibits["predicted"], exhibits["encoded"])
    write_atomically(workdir / ANIMATION, gif)
    note = (
        "Test sequences. All latents in the last row follow from the first frame and the actions alone. Frames are "
        "read from latents by a ridge regression, which the model does not learn from."
    )
    picture = embed_image(gif, f"Animation of {exhibits['predicted'].shape[1]} predicted frames beside the truth")
    return [Card("Decoded predictions", [picture], note, wide=True)]
