"""Reads the files of a run for its pages, of which some may be missing or cut off, and finds who shows its results."""

import dataclasses
import json
import pathlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import numpy as np

from jepa_jax.base.classes import ClassTable, load_object
from jepa_jax.base.files import read_json_or_empty
from jepa_jax.base.selection import SELECTION_KEY
from jepa_jax.base.text import data_size, duration, number, percent, short
from jepa_jax.config.schema import flatten
from jepa_jax.reports.parts import KeyFigure, Section

# Key of summary.json -> its name, how it is shown.
SUMMARY_ROWS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "status": ("Status", str),
    "probe_accuracy": ("Linear probe, test accuracy", percent),
    SELECTION_KEY: ("Linear probe, held-out train images", percent),
    "untrained_probe_accuracy": ("Linear probe of the untrained encoder", percent),
    f"untrained_{SELECTION_KEY}": ("Untrained encoder, held-out train images", percent),
    "knn_accuracy": ("k-NN, test accuracy", percent),
    "untrained_knn_accuracy": ("k-NN of the untrained encoder", percent),
    "online_probe_accuracy": ("Online probe, test accuracy", percent),
    "chance_accuracy": ("Chance: guessing, or the commonest class", percent),
    "effective_rank": ("Effective rank", short),
    "lidar": ("LiDAR", short),
    "alignment": ("Alignment of two views", short),
    "uniformity": ("Uniformity", short),
    "collapse_warning": ("Collapse", lambda value: str(value or "none")),
    "feature_dim": ("Feature dimension", short),
    "num_classes": ("Classes", short),
    "probe_train_images": ("Images the probe was fitted on", short),
    "probe_test_images": ("Images the probe was tested on", short),
    "steps": ("Steps", short),
    "epochs": ("Epochs", short),
    "images_per_sec": ("Elements per second", short),
    "wall_seconds": ("Time", duration),
    "cpu_seconds": ("CPU time, user + system", duration),
    "peak_memory_bytes": ("Peak memory", data_size),
    "checkpoint_bytes": ("Checkpoint", data_size),
    "compilations": ("Compilations", short),
    "params_sha256": ("SHA-256 of the parameters", str),
}
RESULTS = ClassTable("RESULTS", {})  # the core shows accuracies of encoders; everything else belongs to projects
CHOSEN = ("method", "model", "data")  # groups of the config that name what a run is made of


@dataclasses.dataclass(frozen=True)
class RunFiles:
    """What a workdir holds; a file that is missing or broken is empty here and described in `problems`."""

    workdir: pathlib.Path
    config: Mapping[str, Any]
    summary: Mapping[str, Any]
    environment: Mapping[str, Any]
    metrics: Mapping[str, tuple[np.ndarray, np.ndarray]]  # key -> steps, values (NaN where not finite)
    epochs_per_step: float | None
    seconds: float | None  # from the start to the last row of metrics
    problems: Mapping[str, str]  # file name -> sentence

    def latest(self, key: str) -> float | None:
        """Returns the last finite value of a metric."""
        _, values = self.metrics.get(key, (None, np.zeros(0)))
        finite = values[np.isfinite(values)]
        return float(finite[-1]) if len(finite) else None

    def result(self, name: str) -> float | None:
        return number(self.summary.get(name))

    def accuracy(self, name: str) -> float | None:
        """Returns an accuracy of the summary, or its last value in the metrics while there is no summary."""
        value = self.result(name)
        return self.latest(f"eval/{name}") if value is None else value

    @property
    def status(self) -> str:
        return str(self.summary.get("status") or ("finished" if self.summary else "not finished"))

    @property
    def has_labels(self) -> bool:
        """Whether accuracies are measured, as far as the files tell."""
        return self.summary.get("num_classes") != 0

    def choice(self, group: str, key: str) -> str:
        """Returns a value of the config as text, "" without one."""
        part = self.config.get(group)
        return str(part.get(key) or "") if isinstance(part, dict) else ""

    @property
    def choices(self) -> dict[str, str]:
        """Returns the names of the method, the model and the data; "" where the config has none."""
        return {group: self.choice(group, "source" if group == "data" else "name") for group in CHOSEN}


def elements_of(workdir: pathlib.Path) -> str:
    """Returns what the data of a run consist of, in the plural."""
    known = read_json_or_empty(workdir / "elements.json")
    return "elements" if known and "image" not in known else "images"


def probe_gain(summary: Mapping[str, Any]) -> float | None:
    """Returns the points that the linear probe gained by training."""
    trained, untrained = (number(summary.get(key)) for key in ("probe_accuracy", "untrained_probe_accuracy"))
    return None if trained is None or untrained is None else trained - untrained


def read_run(workdir: pathlib.Path) -> RunFiles:
    """Returns what a workdir holds; nothing that is missing or broken raises."""
    problems: dict[str, str] = {}
    config, summary, environment = (
        _read_object(workdir / name, problems) for name in ("config.json", "summary.json", "environment.json")
    )
    rows = _read_rows(workdir / "metrics.jsonl", problems)
    clock = [(number(row["step"]), number(row.get("epoch")), number(row.get("time"))) for row in rows]
    rates = [epoch / step for step, epoch, _ in clock if step and epoch]
    times = [time for _, _, time in clock if time is not None]
    return RunFiles(
        workdir=workdir,
        config=config,
        summary=summary,
        environment=environment,
        metrics=collect_metrics(rows),
        epochs_per_step=rates[-1] if rates else None,
        seconds=times[-1] if times else None,
        problems=problems,
    )


def _read_object(path: pathlib.Path, problems: dict[str, str]) -> dict[str, Any]:
    value = read_json_or_empty(path)
    if not value:
        reason = "holds no JSON object: it may have been cut off" if path.exists() else "has not been written"
        problems[path.name] = f"{path.name} {reason}."
    return value


def _read_rows(path: pathlib.Path, problems: dict[str, str]) -> list[dict[str, Any]]:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        problems[path.name] = f"{path.name} has not been written."
        return []
    rows, broken = [], 0
    for line in lines:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if isinstance(row, dict) and number(row.get("step")) is not None:
            rows.append(row)
        elif line.strip():
            broken += 1
    if broken:
        problems[path.name] = f"{broken:,} lines of {path.name} were left out: not JSON, or without a step."
    elif not rows:
        problems[path.name] = f"{path.name} is empty."
    return rows


def collect_metrics(rows: Iterable[Mapping[str, Any]]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Returns key -> (steps in order, values); where a resumed run repeats a step, the later value counts."""
    columns: dict[str, dict[float, float]] = {}
    for row in rows:
        for key, value in row.items():
            if "/" in key and not isinstance(value, list | dict | bool):
                known = number(value)
                columns.setdefault(key, {})[float(row["step"])] = np.nan if known is None else known
    ordered = {key: np.array(sorted(points.items())) for key, points in columns.items()}
    return {key: (points[:, 0], points[:, 1]) for key, points in ordered.items()}


def json_pairs(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns the leaves of a nested dict as (dotted key, value as JSON writes it)."""
    return [
        (key, value if isinstance(value, str) and value else json.dumps(value, default=str))
        for key, value in flatten(values).items()
    ]


def shown(value: Any, show: Callable[[Any], str]) -> str:
    """Returns a value as text, a dash for None."""
    return "–" if value is None else show(value)


class Results(Protocol):
    """Shows figures of one kind of task, and nothing for runs that do not have them.

    Attributes:
      charts: titles of charts, and for each the names of its curves by metric.
    """

    charts: Mapping[str, Mapping[str, str]]

    def key_figures(self, run: RunFiles) -> list[KeyFigure]:
        """Returns the figures that replace the accuracies of an encoder at the top of the page."""

    def section(self, run: RunFiles) -> Section | None:
        """Returns the project's section of the page; may write further files into the folder of the run."""

    def summary_lines(self, summary: Mapping[str, Any]) -> list[str]:
        """Returns the figures of summary.json as lines for a terminal."""


def project_results() -> list[Results]:
    """Returns the `Results` of all projects."""
    return [load_object(reference)() for reference in RESULTS.values()]
