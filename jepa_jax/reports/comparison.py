"""Runs side by side: what they reached, how they got there, and where their configs differ; one HTML page."""

import datetime
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jepa_jax.base.errors import UserError
from jepa_jax.base.files import write_atomically
from jepa_jax.config.schema import flatten
from jepa_jax.reports import html
from jepa_jax.reports.charts import Bar, Series, bars, line_chart
from jepa_jax.reports.evaluation_page import ROWS, level_name, read_object
from jepa_jax.reports.html import Section
from jepa_jax.reports.run_report import SUMMARY_ROWS, RunFiles, read_run

# Rows of the summary table, of those that a report knows.
COMPARED = (
    "status", "probe_accuracy", "untrained_probe_accuracy", "knn_accuracy", "online_probe_accuracy", "feature_dim",
    "steps", "epochs", "images_per_sec", "wall_seconds", "cpu_seconds", "peak_memory_bytes", "compilations",
)  # fmt: skip
# Title, metric, unit, options of the chart.
CURVES: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    ("Online probe, test accuracy", "eval/online_probe_accuracy", "%", {}),
    ("k-NN, test accuracy", "eval/knn_accuracy", "%", {}),
    ("Loss", "train/loss", "each method's own", {"log": "offer", "smooth": True}),
    ("Images a second", "speed/images_per_sec", "", {"smooth": True, "from_zero": True}),
    ("Learning rate", "train/lr", "", {"log": "offer", "from_zero": True}),
    ("Gradient norm", "train/grad_norm", "", {"log": "offer", "smooth": True}),
)
# Rows of an evaluation that a terminal shows; the page shows all.
IN_SHORT = (
    "Linear probe, top-1",
    "k-NN, k 20, T 0.07",
    "Fine-tuned",
    "Few-shot, 5 examples",
    "Effective rank",
    "Collapse",
)
COLLAPSE = ("relative_spread", "effective_rank", "mean_abs_correlation", "std_mean")


class Compared(NamedTuple):
    """A run, the name it has on the page, and its eval.json ({} without one)."""

    name: str
    run: RunFiles
    evaluation: Mapping[str, Any]


def compare(workdirs: Sequence[str | pathlib.Path], output: str | pathlib.Path | None = None) -> dict[str, Any]:
    """Writes the page (default: comparison.html beside the first workdir); returns the figures of each run."""
    paths = [pathlib.Path(workdir).expanduser() for workdir in workdirs]
    if len({path.resolve() for path in paths}) < 2:
        raise UserError("compare needs two runs or more; give their folders: scripts/compare.py runs/a runs/b")
    for path in paths:
        if not path.is_dir():
            raise UserError(f"{path}: there is no such folder; give the folders of runs")
        if not (path / "config.json").exists():
            raise UserError(f"{path}: holds no run (no config.json); give the folders of runs")
    runs = [
        Compared(name, read_run(path), read_object(path / "eval" / "eval.json"))
        for name, path in zip(short_names(paths), paths, strict=True)
    ]
    target = pathlib.Path(output).expanduser() if output else paths[0].resolve().parent / "comparison.html"
    if not target.parent.is_dir():
        raise UserError(f"--output={target}: there is no folder {target.parent}; make it, or choose another")
    write_atomically(target, page(runs))
    differing = differing_table([run.config for _, run, _ in runs])
    return {
        "output": str(target),
        "runs": {item.name: figures_of(item) for item in runs},
        "differing_keys": [row[0] for row in differing],
    }


def short_names(paths: Sequence[pathlib.Path]) -> list[str]:
    """The fewest last parts of each path that tell them all apart."""
    parts = [path.resolve().parts for path in paths]
    for count in range(1, max(map(len, parts)) + 1):
        names = [os.sep.join(p[-count:]) for p in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{path} ({i})" for i, path in enumerate(paths, start=1)]  # the same folder twice


def figures_of(item: Compared) -> dict[str, Any]:
    """What the last line of the command says of a run."""
    summary = item.run.summary
    result = {key: summary.get(key) for key in COMPARED}
    result["status"] = summary.get("status", "not finished")
    if item.evaluation:
        result["evaluation"] = {
            level: {label: value for label, value in _evaluated(results).items()}
            for level, results in item.evaluation.get("levels", {}).items()
        }
    return result


def _evaluated(results: Mapping[str, Any]) -> dict[str, str]:
    """The rows of an evaluation's table for one level."""
    rows = {}
    for label, show in ROWS.items():
        try:
            rows[label] = show(results)
        except (KeyError, TypeError):
            continue
    return rows


def page(runs: Sequence[Compared]) -> str:
    """The whole document."""
    names = " · ".join(item.name for item in runs)
    header = f'<h1>{len(runs)} runs side by side</h1><p class="sub">{html.escape(names)}</p>'
    sections = [summary_section(runs), accuracy_section(runs), *evaluation_sections(runs)]
    sections += [curve_section(runs), config_section(runs)]
    written = datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")
    return html.page("Runs side by side · jepa_jax", header, sections, f"Written {written}.")


def summary_rows(runs: Sequence[Compared]) -> list[list[str]]:
    """Label and a text for each run; what no run has is left out."""
    rows: list[list[str]] = []
    for group, key in (("method", "name"), ("model", "name"), ("data", "source")):
        rows.append([group.capitalize(), *(str(_entry(item.run.config, group, key)) for item in runs)])
    for key in COMPARED:
        label, show = SUMMARY_ROWS[key]
        cells = [_shown(item.run.summary.get(key), show) for item in runs]
        if key == "status":
            cells = [str(item.run.summary.get("status", "not finished")) for item in runs]
        if set(cells) != {"–"}:
            rows.append([label, *cells])
    gains = [_gain(item.run.summary) for item in runs]
    if set(gains) != {"–"}:
        rows.insert(6, ["Gained by training", *gains])
    return rows


def _gain(summary: Mapping[str, Any]) -> str:
    trained, untrained = (html.number(summary.get(key)) for key in ("probe_accuracy", "untrained_probe_accuracy"))
    return "–" if trained is None or untrained is None else f"{trained - untrained:+.1f} points"


def _shown(value: Any, show: Callable[[Any], str]) -> str:
    return "–" if value is None else show(value)


def _entry(config: Mapping[str, Any], group: str, key: str) -> Any:
    part = config.get(group)
    return part.get(key, "–") if isinstance(part, dict) else "–"


def summary_section(runs: Sequence[Compared]) -> Section:
    problems = "".join(
        html.absent(f"{item.name}: {text}")
        for item in runs for name, text in item.run.problems.items() if name != "environment.json"
    )  # fmt: skip
    body = html.card("", html.table(summary_rows(runs), ("", *(item.name for item in runs))) + problems)
    return Section("Summary", body)


def accuracy_section(runs: Sequence[Compared]) -> Section:
    """Bars of the accuracies that a run measures of itself."""
    groups: dict[str, list[Bar]] = {}
    for title, key, kind in (
        ("Linear probe", "probe_accuracy", "main"),
        ("The same of the untrained encoder", "untrained_probe_accuracy", "baseline"),
        ("k-NN", "knn_accuracy", "run"),
    ):
        values = [(item.name, item.run.accuracy(key)) for item in runs]
        groups[title] = [Bar(name, value, kind) for name, value in values if value is not None]
    if not any(groups.values()):
        return Section("Accuracy", html.card("", html.absent("No accuracy has been measured yet.")))
    return Section("Accuracy", html.card("", bars(groups)))


def evaluation_sections(runs: Sequence[Compared]) -> list[Section]:
    """The table of eval.json, a column for each run and level that was evaluated."""
    columns = {}
    for item in runs:
        levels = item.evaluation.get("levels", {})
        for level, results in levels.items():
            name = item.name if len(levels) == 1 else f"{item.name}, {level_name(level)}"
            columns[name] = _evaluated(results)
    if not columns:
        words = "No run has been evaluated: python scripts/evaluate.py --workdir=..."
        return [Section("Evaluation", html.card("", html.absent(words)))]
    labels = [label for label in ROWS if any(label in column for column in columns.values())]
    rows = [[label, *(column.get(label, "–") for column in columns.values())] for label in labels]
    missing = [item.name for item in runs if not item.evaluation]
    note = f"Not evaluated: {', '.join(missing)}." if missing else ""
    return [Section("Evaluation", html.card("", html.table(rows, ("", *columns)), note))]


def curve_section(runs: Sequence[Compared]) -> Section:
    """Metrics over epochs; a run keeps its colour in every chart."""
    watched: tuple[tuple[str, str, str, dict[str, Any]], ...] = tuple(
        (f"Collapse watch: {name.replace('_', ' ')}", key, "", {})
        for name in COLLAPSE
        for key in sorted({key for item in runs for key in item.run.metrics if key.endswith(f"/{name}")})
    )
    charts = []
    for title, key, unit, options in (*CURVES, *watched):
        if not any(key in item.run.metrics for item in runs):
            continue
        series = [Series(item.name, *_over_epochs(item.run, key)) for item in runs]
        charts.append(line_chart(title, series, x_label="epoch", y_label=unit, **options))
    return Section("Curves", html.grid(charts) if charts else html.card("", html.absent("No metric was recorded.")))


def _over_epochs(run: RunFiles, key: str) -> tuple[np.ndarray, np.ndarray]:
    steps, values = run.metrics.get(key, (np.zeros(0), np.zeros(0)))
    return steps * (run.epochs_per_step or float("nan")), values


def differing_table(configs: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Key and its value in each config, for the keys whose values are not all equal."""
    flat = [flatten(config) for config in configs]
    keys = sorted(set().union(*flat))
    rows = [[key, *("(absent)" if key not in part else str(part[key]) for part in flat)] for key in keys]
    return [row for row in rows if len(set(row[1:])) > 1]


def config_section(runs: Sequence[Compared]) -> Section:
    rows = differing_table([item.run.config for item in runs])
    if not rows:
        return Section("Config", html.card("", html.absent("The configs are equal.")))
    total = len(set().union(*(flatten(item.run.config) for item in runs)))
    body = html.table(rows, ("key", *(item.name for item in runs)))
    return Section("Config", html.card("Where the configs differ", body, f"{len(rows)} of {total} keys."))


def table_text(runs: Mapping[str, Mapping[str, Any]]) -> str:
    """The summary as a text table, for a terminal."""
    rows = [["", *runs]]
    for key in COMPARED:
        label, show = SUMMARY_ROWS[key]
        rows.append([label, *(_shown(figures.get(key), show) for figures in runs.values())])
    evaluations = [figures.get("evaluation", {}) for figures in runs.values()]
    for level in sorted({level for evaluation in evaluations for level in evaluation}, key=int):
        for label in IN_SHORT:
            cells = [evaluation.get(level, {}).get(label, "–") for evaluation in evaluations]
            rows.append([f"{label}, {level_name(level)}", *cells])
    rows = [row for row in rows if set(row[1:]) != {"–"}]
    widths = [min(48, max(len(row[i]) for row in rows)) for i in range(len(rows[0]))]

    def line(row):
        first, *others = (cell[:48] for cell in row)
        return "  ".join([first.ljust(widths[0]), *(c.rjust(w) for c, w in zip(others, widths[1:], strict=True))])

    return "\n".join(map(line, rows))
