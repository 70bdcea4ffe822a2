"""Compares runs on one page: results, evaluations, curves, and the config keys that differ."""

import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jepa_jax.base.errors import UserError
from jepa_jax.base.files import read_json_or_empty, user_path
from jepa_jax.base.selection import SELECTION_KEY
from jepa_jax.config.schema import flatten
from jepa_jax.reports.charts import Series, line_chart
from jepa_jax.reports.evaluation_page import evaluation_table, level_name, level_rows
from jepa_jax.reports.page import write_page
from jepa_jax.reports.parts import Card, Page, Section, Table, Text, absent, absent_section, card_grid
from jepa_jax.reports.run_files import CHOSEN, SUMMARY_ROWS, RunFiles, probe_gain, read_run, shown
from jepa_jax.reports.tables import text_table

NOT_COMPARED = {
    "untrained_knn_accuracy", f"untrained_{SELECTION_KEY}", "num_classes", "probe_train_images", "probe_test_images",
    "params_sha256", "chance_accuracy",
}  # fmt: skip
COMPARED = [key for key in SUMMARY_ROWS if key not in NOT_COMPARED]
# Title, metric and options of a chart.
CURVES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("Online probe, test accuracy", "eval/online_probe_accuracy", {"y_label": "%"}),
    ("k-NN, test accuracy", "eval/knn_accuracy", {"y_label": "%"}),
    ("Loss", "train/loss", {"y_label": "each method's own", "log": "offer", "smooth": True}),
    ("Elements per second", "speed/images_per_sec", {"smooth": True, "from_zero": True}),
    ("Learning rate", "train/lr", {"log": "offer", "from_zero": True}),
    ("Gradient norm", "train/grad_norm", {"log": "offer", "smooth": True}),
)
# Rows of an evaluation that a terminal shows; the page shows all.
BRIEF = (
    "Linear probe, top-1",
    "k-NN, k 20, T 0.07",
    "Fine-tuned",
    "Few-shot, 5 examples",
    "Effective rank",
    "Collapse",
)
COLLAPSE = ("relative_spread", "effective_rank", "mean_abs_correlation", "std_mean")


class ComparedRun(NamedTuple):
    """A run, its name on the page, and its eval.json ({} without one)."""

    name: str
    run: RunFiles
    evaluation: Mapping[str, Any]


def write_comparison(
    workdirs: Sequence[str | pathlib.Path], output: str | pathlib.Path | None = None
) -> dict[str, Any]:
    """Writes the page (default: comparison.html beside the first workdir); returns the figures of each run."""
    paths = list(dict.fromkeys(user_path(workdir, "workdir").resolve() for workdir in workdirs))
    if len(paths) < 2:
        raise UserError("compare needs two runs or more; give their folders: jepa-jax compare runs/a runs/b")
    for path in paths:
        if not (path / "config.json").exists():
            reason = "holds no run (no config.json)" if path.is_dir() else "there is no such folder"
            raise UserError(f"{path}: {reason}; give the folders of runs")
    target = user_path(output, "--output") if output else paths[0].parent / "comparison.html"
    if not target.parent.is_dir():
        raise UserError(f"--output={target}: there is no folder {target.parent}; make it, or choose another")
    runs = [
        ComparedRun(name, read_run(path), read_evaluation(path / "eval" / "eval.json"))
        for name, path in zip(short_names(paths), paths, strict=True)
    ]
    warnings = data_warnings(runs)
    write_page(target, comparison_page(runs, warnings))
    return {
        "output": str(target),
        "warnings": warnings,
        "runs": {item.name: figures_of(item) for item in runs},
        "differing_keys": [row[0] for row in differing_table([item.run.config for item in runs])],
    }


def read_evaluation(path: pathlib.Path) -> dict[str, Any]:
    """Returns an eval.json with those of its levels that can be shown; {} without one."""
    evaluation = read_json_or_empty(path)
    levels = evaluation.get("levels")
    items = levels.items() if isinstance(levels, Mapping) else ()
    shown = {name: one for name, one in items if name.isdecimal() and isinstance(one, Mapping)}
    return evaluation | {"levels": shown} if evaluation else {}


def short_names(paths: Sequence[pathlib.Path]) -> list[str]:
    """Returns the fewest last parts of each path that tell them all apart."""
    parts = [path.parts for path in paths]
    candidates = ([os.sep.join(p[-count:]) for p in parts] for count in range(1, max(map(len, parts)) + 1))
    return next(names for names in candidates if len(set(names)) == len(names))


def figures_of(item: ComparedRun) -> dict[str, Any]:
    """Returns the figures of a run in the JSON object that `jepa-jax compare` prints."""
    result = {key: item.run.summary.get(key) for key in COMPARED} | {"status": item.run.status}
    if item.evaluation:
        levels = item.evaluation.get("levels", {})
        result["evaluation"] = {level: level_rows(results) for level, results in levels.items()}
    return result


def data_warnings(runs: Sequence[ComparedRun]) -> list[str]:
    """Returns warnings about differing data or numbers of test images, which make accuracies incomparable."""
    warnings = []
    sources = {item.name: item.run.choices["data"] for item in runs}
    identities = {item.name: data_identity(item.run.summary) for item in runs}
    if len(set(sources.values())) > 1:
        warnings.append(f"The runs have different data ({in_brackets(sources)}): their accuracies are not comparable.")
    elif all(identities.values()) and any(one != identities[runs[0].name] for one in identities.values()):
        counts = {  # with the first digits of the digest of some of their images
            name: " and ".join(f"{count} {split} [{digest[:6]}]" for split, (count, digest) in found.items())
            for name, found in identities.items()
        }
        warnings.append(
            f"The runs read different images from {sources[runs[0].name]} ({in_brackets(counts)}): their accuracies "
            "are not comparable."
        )
    measured = {
        "The final accuracies": {item.name: item.run.summary.get("probe_test_images") for item in runs},
        "The evaluations": {item.name: item.evaluation.get("test_images") for item in runs},
    }
    for what, found in measured.items():
        known = {name: f"{count:,}" for name, count in found.items() if type(count) is int}
        if len(set(known.values())) > 1:
            warnings.append(f"{what} are of different numbers of test images ({in_brackets(known)}).")
    return warnings


def data_identity(summary: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Returns the number of images and the digest of each split; {} if the summary does not tell them."""
    try:
        return {split: (f"{one['images']:,}", str(one["sha256"])) for split, one in summary["data_identity"].items()}
    except (KeyError, TypeError, ValueError, AttributeError):
        return {}


def in_brackets(values: Mapping[str, str]) -> str:
    return ", ".join(f"{name}: {value}" for name, value in values.items())


def comparison_page(runs: Sequence[ComparedRun], warnings: Sequence[str]) -> Page:
    chosen = [[group.capitalize(), *(item.run.choices[group] or "–" for item in runs)] for group in CHOSEN]
    names = [item.name for item in runs]
    summary = Table(chosen + summary_rows([figures_of(item) for item in runs]), ["", *names])
    problems = [
        absent(f"{item.name}: {text}")
        for item in runs
        for file, text in item.run.problems.items()
        if file != "environment.json"
    ]
    differing = differing_table([item.run.config for item in runs])
    config = absent_section("Config", "The configs are equal.")
    if differing:
        total = len(set().union(*(flatten(item.run.config) for item in runs)))
        table = Table(differing, ["key", *names])
        config = Section("Config", [Card("Where the configs differ", [table], f"{len(differing)} of {total} keys.")])
    return Page(
        heading=f"{len(runs)} runs side by side",
        subtitle=" · ".join(names),
        sections=[
            *([Section("", [Card("", [Text(text, "warn", "Warning") for text in warnings])])] if warnings else []),
            Section("Summary", [Card("", [summary, *problems])]),
            evaluation_section(runs),
            curve_section(runs),
            config,
        ],
    )


def summary_rows(columns: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Returns rows of a label and a text for each run; rows that no run has a value for are left out."""
    rows = []
    for key in COMPARED:
        label, show = SUMMARY_ROWS[key]
        rows.append([label, *(shown(figures.get(key), show) for figures in columns)])
        if key == "untrained_probe_accuracy":
            rows.append(
                ["Gained by training", *(shown(probe_gain(figures), "{:+.1f} points".format) for figures in columns)]
            )
    return [row for row in rows if set(row[1:]) != {"–"}]


def evaluation_section(runs: Sequence[ComparedRun]) -> Section:
    columns = {}
    for item in runs:
        levels = item.evaluation.get("levels", {})
        for level, results in levels.items():
            columns[f"{item.name}, {level_name(level)}" if len(levels) > 1 else item.name] = results
    if not columns:
        return absent_section("Evaluation", "No run has been evaluated; jepa-jax evaluate does that.")
    missing = ", ".join(item.name for item in runs if not item.evaluation)
    table = Table(evaluation_table(columns), ["", *columns])
    return Section("Evaluation", [Card("", [table], f"Not evaluated: {missing}." if missing else "")])


def curve_section(runs: Sequence[ComparedRun]) -> Section:
    """Returns charts of metrics over epochs; a run has the same colour in every chart."""
    recorded = {key for item in runs for key in item.run.metrics}
    watched: list[tuple[str, str, dict[str, Any]]] = [
        (f"Collapse watch: {name.replace('_', ' ')}", key, {})
        for name in COLLAPSE
        for key in sorted(recorded)
        if key.endswith(f"/{name}")
    ]
    charts = []
    for title, key, options in (*CURVES, *watched):
        if key in recorded:
            curves = [(item, *item.run.metrics.get(key, (np.zeros(0), np.zeros(0)))) for item in runs]
            series = [Series(item.name, x * (item.run.epochs_per_step or np.nan), y) for item, x, y in curves]
            charts.append(line_chart(title, series, x_label="epoch", **options))
    return Section("Curves", [card_grid(charts)]) if charts else absent_section("Curves", "No metric was recorded.")


def differing_table(configs: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Returns rows of a key and its value in each config, for the keys whose values differ."""
    flat = [flatten(config) for config in configs]
    rows = [
        [key, *(str(config[key]) if key in config else "(absent)" for config in flat)]
        for key in sorted(set().union(*flat))
    ]
    return [row for row in rows if len(set(row[1:])) > 1]


def comparison_text(runs: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns the figures of `write_comparison` as a table for a terminal."""
    rows = [["", *runs], *summary_rows(list(runs.values()))]
    evaluations = [figures.get("evaluation", {}) for figures in runs.values()]
    for level in sorted({level for evaluation in evaluations for level in evaluation}, key=int):
        for label in BRIEF:
            cells = [evaluation.get(level, {}).get(label, "–") for evaluation in evaluations]
            if set(cells) != {"–"}:
                rows.append([f"{label}, {level_name(level)}", *cells])
    return text_table(rows)
