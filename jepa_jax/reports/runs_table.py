"""A table of all runs below a folder: what they are, how far they are, what they reached and what tells them apart."""

import os
import pathlib
import re
import textwrap
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from jepa_jax.base.errors import UserError
from jepa_jax.base.text import data_size, duration, first_of, percent, short
from jepa_jax.config.schema import flatten
from jepa_jax.reports.page import write_page
from jepa_jax.reports.parts import Card, Page, Section
from jepa_jax.reports.run_files import RunFiles, read_run
from jepa_jax.reports.tables import Column, cells_table, table_cells, text_table

FILES = ("config.json", "environment.json")  # that every run begins with, and no export has both
NOT_OF_THE_METHOD = ("log.", "profile.", "data.dir", "data.num_workers")  # keys that do not tell runs apart
NAMED = 4  # keys in the column of differences
COLUMNS = {
    "run": Column(lambda row: row["run"]),
    "recipe": Column(lambda row: row["recipe"]),
    "status": Column(lambda row: row["status"]),
    "steps": Column(lambda row: row["steps"], short),
    "accuracy": Column(lambda row: row["probe_accuracy"], percent),
    "untrained": Column(lambda row: row["untrained_probe_accuracy"], percent),
    "k-NN": Column(lambda row: row["knn_accuracy"], percent),
    "rank": Column(lambda row: row["effective_rank"], lambda value: short(value, 3)),
    "img/s": Column(lambda row: row["images_per_sec"], lambda value: short(value, 3)),
    "time": Column(lambda row: row["wall_seconds"], duration),
    "age": Column(lambda row: row["age_seconds"], lambda value: ago(value)),
    "size": Column(lambda row: row["bytes"], data_size),
    "differs in": Column(lambda row: row["differs_in"]),
}
IN_TERMINAL = ("run", "recipe", "status", "steps", "accuracy", "untrained", "img/s", "age", "size")

CAPTION = (
    "accuracy: linear probe on test images, beside the untrained encoder. differs in: keys with another value than in "
    "most of these runs of the same recipe."
)
DROPPED = ("size", "img/s", "steps", "recipe")  # one after the other, where a terminal is too narrow


def find_runs(folder: str | pathlib.Path) -> list[dict[str, Any]]:
    """Returns a row per run below a folder, or of the run that it is; newest last."""
    root = pathlib.Path(folder).expanduser()
    if not root.is_dir():
        raise UserError(f"{root}: there is no such folder; give one that holds runs")
    places = []
    for path, folders, files in os.walk(root):  # goes on where a folder cannot be read
        if set(FILES) <= set(files):
            places.append(pathlib.Path(path))
            folders.clear()
    if not places:
        raise UserError(f"{root}: no run below it; jepa-jax train makes one")
    found = [(path, read_run(path)) for path in places]
    of_recipe: dict[str, list[RunFiles]] = {}
    for _, run in found:
        of_recipe.setdefault(recipe_of(run), []).append(run)
    usual = {recipe: usual_values(runs) for recipe, runs in of_recipe.items()}
    names = [path.relative_to(root).as_posix() if path != root else path.resolve().name for path, _ in found]
    rows = [run_row(name, run, usual[recipe_of(run)]) for name, (_, run) in zip(names, found, strict=True)]
    return sorted(rows, key=lambda row: -row["age_seconds"])


def run_row(name: str, run: RunFiles, usual: Mapping[str, str]) -> dict[str, Any]:
    """Returns what the table says of a run."""
    own = flatten(run.config)
    differing = [f"{key}={own.get(key)}" for key, value in usual.items() if str(own.get(key)) != value]
    files = [path.stat() for path in run.workdir.rglob("*") if path.is_file()]
    steps = max((step[-1] for step, _ in run.metrics.values() if len(step)), default=None)
    return {
        "run": name,
        "recipe": recipe_of(run),
        "status": run.status,
        "steps": run.result("steps") if run.summary else steps,
        "probe_accuracy": run.result("probe_accuracy"),
        "untrained_probe_accuracy": run.result("untrained_probe_accuracy"),
        "knn_accuracy": run.accuracy("knn_accuracy"),
        "effective_rank": run.result("effective_rank"),
        "images_per_sec": run.result("images_per_sec") or run.latest("speed/images_per_sec"),
        "wall_seconds": run.result("wall_seconds") or run.seconds,
        "age_seconds": time.time() - max(one.st_mtime for one in files),
        "bytes": sum(one.st_size for one in files),
        "differs_in": first_of(differing, NAMED),
    }


def recipe_of(run: RunFiles) -> str:
    """Returns the config that the command named, or else the method of a run that Python started."""
    found = re.search(r"--config[= ](\S+)", str(run.environment.get("command") or ""))
    return pathlib.PurePath(found[1]).name.removesuffix(".py") if found else run.choice("method", "name")


def usual_values(runs: Sequence[RunFiles]) -> dict[str, str]:
    """Returns the commonest value of each key of the config that is not the same in all runs."""
    flat = [{key: str(value) for key, value in flatten(run.config).items()} for run in runs]
    counts = {key: Counter(config.get(key, "None") for config in flat) for key in sorted(set().union(*flat))}
    return {
        key: values.most_common(1)[0][0]
        for key, values in counts.items()
        if len(values) > 1 and not key.startswith(NOT_OF_THE_METHOD)
    }


def ago(seconds: float) -> str:
    """Returns an age in its largest unit: 40 s · 12 min · 5 h · 3 days."""
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def sorted_rows(rows: Sequence[dict[str, Any]], by: str) -> list[dict[str, Any]]:
    """Returns rows by a column: numbers largest first, but for the age; what is missing comes last."""
    if by not in COLUMNS:
        raise UserError(f"--sort={by}: no such column; use one of {', '.join(COLUMNS)}")
    value = COLUMNS[by].value
    known = [row for row in rows if value(row) is not None]
    largest_first = by != "age" and all(isinstance(value(row), int | float) for row in known)
    return sorted(known, key=value, reverse=largest_first) + [row for row in rows if value(row) is None]


def runs_text(rows: Sequence[dict[str, Any]], width: int) -> str:
    shown = list(IN_TERMINAL)
    for dropped in (*DROPPED, ""):
        cells = table_cells(rows, {name: COLUMNS[name] for name in shown})
        table = [list(cells), *([cell.text for cell in row] for row in zip(*cells.values(), strict=True))]
        lines = text_table(table).splitlines()
        if len(lines[0]) <= width or not dropped:
            break
        shown.remove(dropped)
    notes = [f"\n  differs in {row['differs_in']}" if row["differs_in"] else "" for row in rows]
    return "\n".join([lines[0], *map("".join, zip(lines[1:], notes, strict=True)), "", textwrap.fill(CAPTION, width)])


def write_runs(path: str | pathlib.Path, rows: Sequence[dict[str, Any]], folder: str) -> None:
    """Writes the table as a page; a click on a heading sorts it."""
    table = cells_table(table_cells(rows, COLUMNS))
    count = f"{len(rows)} run{'s' if len(rows) > 1 else ''}"
    write_page(path, Page(f"Runs below {folder}", [Section("", [Card("", [table], CAPTION)])], count))
