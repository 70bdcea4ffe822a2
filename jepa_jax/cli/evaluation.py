"""Evaluating a run: the protocols asked for at the levels asked for, into `eval/` of its workdir.

Files: eval.json, eval.md (a table), eval.html (the table and every figure), figures as PNG, and features/ (a cache). A
second evaluation of the same checkpoint adds to the first.
"""

import dataclasses
import datetime
import json
import math
import pathlib
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from jepa_jax.base.console import Console
from jepa_jax.base.errors import UserError
from jepa_jax.base.files import write_atomically, write_json
from jepa_jax.evals.features import Split
from jepa_jax.evals.protocols import PROTOCOLS, Limits, parse_levels, parse_protocols
from jepa_jax.evals.trained_encoder import TrainedEncoder, load
from jepa_jax.program.workdir import Workdir
from jepa_jax.reports import figures
from jepa_jax.reports.evaluation_page import level_name, page, table_markdown
from jepa_jax.runtime.provenance import environment

LARGE = ("confusion", "sweep", "spectrum")  # parts of results that no terminal shows


def evaluate(
    workdir: str | pathlib.Path,
    *,
    protocols: str = "all",
    levels: str = "all",
    data_dir: str | None = None,
    limits: Limits | None = None,
    console: Console,
) -> dict[str, Any]:
    """Measures the newest checkpoint of a run; returns what eval.json holds.

    Raises:
        UserError: an unknown protocol or level, no checkpoint, data that is not there.
    """
    started = time.perf_counter()
    names = parse_protocols(protocols)
    limits = checked(limits or Limits())
    encoder = load(workdir, data_dir=data_dir)
    chosen = parse_levels(levels, encoder.levels)
    folder = Workdir(workdir).path / "eval"
    results = {str(level): measure_level(encoder, level, names, limits, console) for level in chosen}
    earlier = _earlier(folder, encoder.digest, encoder.step)
    if not earlier:
        for path in folder.glob("*.png"):
            path.unlink()
    results = {
        level: earlier.get("levels", {}).get(level, {}) | results.get(level, {})
        for level in sorted(earlier.get("levels", {}).keys() | results.keys(), key=int)
    }
    record = _finite(describe(encoder, limits) | {"levels": results})
    draw(folder, encoder, record, chosen, names, limits, console)
    record["seconds"] = time.perf_counter() - started
    write_json(folder / "eval.json", record)
    write_atomically(folder / "eval.md", table_markdown(record))
    write_atomically(folder / "eval.html", page(record, folder))
    return record


def measure_level(
    encoder: TrainedEncoder, level: int, names: Sequence[str], limits: Limits, console: Console
) -> dict[str, Any]:
    """Features of a level, then each protocol on them, with a progress bar for each."""
    where = "" if encoder.levels == 1 else f" (level {level})"
    console.start(f"features{where}", len(encoder.train) + len(encoder.test))
    began, hits = time.perf_counter(), encoder.cache.hits
    encoder.features(level, console.advance)
    if "feature_quality" in names:
        encoder.raw_features(level)
    console.stop()
    origin = "from the cache" if encoder.cache.hits > hits else f"{time.perf_counter() - began:.1f} s"
    console.line(f"features{where}: {len(encoder.train):,} train and {len(encoder.test):,} test images, {origin}")
    results = {}
    for name in names:
        protocol = PROTOCOLS[name]
        console.start(f"{protocol.title}{where}", protocol.total(encoder, limits))
        began = time.perf_counter()
        results[name] = protocol.run(encoder, level, limits, console.advance)
        results[name]["seconds"] = time.perf_counter() - began
        console.stop()
        console.line(f"{protocol.title}{where}: {in_words(name, results[name])}, {results[name]['seconds']:.1f} s")
    return results


def in_words(name: str, result: dict[str, Any]) -> str:
    """The figure of a protocol that a person looks for first."""
    if name == "feature_quality":
        return result["collapse"] or f"effective rank {result['effective_rank']:.1f} of {result['dimensions']:.0f}"
    if name == "few_shot":
        shots = [f"{v['accuracy']:.1f} ± {v['interval_95']:.1f} % ({k}-shot)" for k, v in result["shots"].items()]
        return ", ".join(shots) or "too few images of a class"
    return f"{result['accuracy']:.1f} %"


def draw(
    folder: pathlib.Path,
    encoder: TrainedEncoder,
    record: dict[str, Any],
    levels: Sequence[int],
    names: Sequence[str],
    limits: Limits,
    console: Console,
) -> None:
    """The figures of what was measured now; the spectrum shows every level that ever was."""
    console.start("figures", len(levels) + 2)
    for level in levels:
        result = record["levels"][str(level)]
        if "linear_probe" in names and "confusion" in result["linear_probe"]:
            confusion = result["linear_probe"]["confusion"]
            figures.confusion_figure(folder / f"confusion_level{level}.png", confusion, encoder.classes)
        if "knn" in names:
            figures.sweep_figure(folder / f"knn_level{level}.png", result["knn"])
        if "feature_quality" in names:
            _, test = encoder.features(level)
            pictured = np.random.default_rng(0).permutation(len(test.labels))[: limits.pictured_points]
            points = Split(test.features[pictured], test.labels[pictured])
            if len(pictured) >= 10:
                figures.scatter_figure(folder / f"scatter_level{level}.png", points, encoder.classes)
        console.advance()
    if "feature_quality" in names:
        spectra = {
            level_name(level): result["feature_quality"]["spectrum"]
            for level, result in record["levels"].items() if "feature_quality" in result
        }  # fmt: skip
        figures.spectrum_figure(folder / "spectrum.png", spectra)
        console.advance()
        images = encoder.test.batch(np.arange(min(figures.PICTURED_IMAGES, len(encoder.test))))["image"]
        maps = encoder.patch_features(images)
        if maps is not None:
            figures.patch_figure(folder / "patches.png", images, maps)
    console.stop()


def describe(encoder: TrainedEncoder, limits: Limits) -> dict[str, Any]:
    """What was evaluated, and under which limits."""
    config = encoder.config
    return {
        "method": config.method.name,
        "model": config.model.name,
        "data": config.data.source,
        "weights": config.eval.weights,
        "step": encoder.step,
        "params_sha256": encoder.digest,
        "classes": list(encoder.classes),
        "train_images": len(encoder.train),
        "test_images": len(encoder.test),
        "limits": dataclasses.asdict(limits),
        "choices_made_on": "a held-out tenth of the train split; the test split is looked at once",
        "written": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "environment": environment(),
    }


def checked(limits: Limits) -> Limits:
    """Refuses limits that leave nothing to measure."""
    least = {"fine_tune_epochs": 1, "fine_tune_images": 0, "lidar_images": 2, "lidar_views": 2, "pictured_points": 10}
    for name, smallest in least.items():
        if getattr(limits, name) < smallest:
            raise UserError(f"--{name}={getattr(limits, name)}: must be at least {smallest}")
    return limits


def without_large_parts(record: dict[str, Any]) -> dict[str, Any]:
    """The record for one line of JSON: no matrices, spectra or environment."""
    levels = {
        level: {
            name: {key: value for key, value in result.items() if key not in LARGE} for name, result in results.items()
        }
        for level, results in record["levels"].items()
    }
    return {key: value for key, value in record.items() if key not in ("environment", "classes")} | {"levels": levels}


def _earlier(folder: pathlib.Path, digest: str, step: int) -> dict[str, Any]:
    """eval.json, if it is of this checkpoint."""
    try:
        record = json.loads((folder / "eval.json").read_text())
        return record if (record["params_sha256"], record["step"]) == (digest, step) else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _finite(value: Any) -> Any:
    """JSON has no NaN: figures that are not finite become null."""
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
