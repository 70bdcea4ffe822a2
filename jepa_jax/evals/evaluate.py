"""Evaluates a run: the chosen protocols on the features of its newest checkpoint, at the chosen levels.

A second evaluation of the same checkpoint adds to the first, whose results are read from `eval/eval.json`.
"""

import dataclasses
import datetime
import math
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jepa_jax.base.console import Console
from jepa_jax.base.errors import UserError
from jepa_jax.base.files import read_json_or_empty
from jepa_jax.data.contract import sample
from jepa_jax.evals.features import Split
from jepa_jax.evals.protocols import PROTOCOLS, Limits, parse_levels, parse_protocols
from jepa_jax.evals.trained_encoder import TrainedEncoder, load
from jepa_jax.program.workdir import Workdir
from jepa_jax.runtime.provenance import environment

LARGE = ("confusion", "sweep", "spectrum")  # parts of results that no terminal shows
PICTURED_IMAGES = 10  # whose patch features are drawn
FEWEST_POINTS = 10  # of a scatter plot


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """The results of an evaluation, and the arrays that its figures show."""

    folder: pathlib.Path
    record: dict[str, Any]  # what eval.json holds: these results and earlier ones of the same checkpoint
    levels: Sequence[int]  # that were measured now
    protocols: Sequence[str]  # that were measured now
    extends_earlier: bool
    points: Mapping[int, Split]  # level -> features of some test images
    patches: tuple[np.ndarray, np.ndarray] | None  # images and their patch features [B, gh, gw, F]


def evaluate(
    workdir: str | pathlib.Path,
    *,
    protocols: str = "all",
    levels: str = "all",
    data_dir: str | None = None,
    limits: Limits | None = None,
    console: Console,
) -> Evaluation:
    """Measures the newest checkpoint of a run.

    Raises:
      UserError: an unknown protocol or level, no checkpoint, data that is missing.
    """
    started = time.perf_counter()
    parse_protocols(protocols)  # a misspelled name is reported before anything is loaded
    limits = checked(limits or Limits())
    encoder = load(workdir, data_dir=data_dir)
    names = parse_protocols(protocols, labelled=bool(encoder.classes))
    chosen = parse_levels(levels, encoder.levels)
    folder = Workdir(workdir).path / "eval"
    results = {str(level): measure_level(encoder, level, names, limits, console) for level in chosen}
    earlier = _earlier_levels(folder, encoder)
    merged = {
        level: earlier.get(level, {}) | results.get(level, {})
        for level in sorted(earlier.keys() | results.keys(), key=int)
    }
    points: dict[int, Split] = {}
    if "feature_quality" in names and len(encoder.test) >= FEWEST_POINTS:
        points = {level: scatter_points(encoder, level, limits) for level in chosen}
    patches = patch_maps(encoder) if "feature_quality" in names else None
    record = describe_encoder(encoder, limits) | {"levels": merged, "seconds": time.perf_counter() - started}
    return Evaluation(folder, _finite(record), chosen, names, bool(earlier), points, patches)


def measure_level(
    encoder: TrainedEncoder, level: int, names: Sequence[str], limits: Limits, console: Console
) -> dict[str, Any]:
    """Returns protocol -> results at a level; computes the features first and shows a progress bar for each."""
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


def in_words(name: str, result: Mapping[str, Any]) -> str:
    """Returns the most important figure of a protocol."""
    if name == "feature_quality":
        return result["collapse"] or f"effective rank {result['effective_rank']:.1f} of {result['dimensions']:.0f}"
    if name == "few_shot":
        shots = [f"{v['accuracy']:.1f} ± {v['interval_95']:.1f} % ({k}-shot)" for k, v in result["shots"].items()]
        return ", ".join(shots) or "too few images per class"
    return f"{result['accuracy']:.1f} %"


def scatter_points(encoder: TrainedEncoder, level: int, limits: Limits) -> Split:
    """Returns the features of randomly chosen test images, from the cache."""
    _, test = encoder.features(level)
    chosen = sample(len(test.features), limits.pictured_points)
    return Split(test.features[chosen], test.labels[chosen] if len(test.labels) else test.labels)


def patch_maps(encoder: TrainedEncoder) -> tuple[np.ndarray, np.ndarray] | None:
    """Returns some test images and their patch features; None without images, or without a grid of patches."""
    if "image" not in encoder.test.spec or not encoder.has_patches:
        return None
    images = encoder.test.batch(sample(len(encoder.test), PICTURED_IMAGES))["image"]
    return images, encoder.patch_tokens(images)


def describe_encoder(encoder: TrainedEncoder, limits: Limits) -> dict[str, Any]:
    """Returns what was evaluated, and under which limits."""
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
        "choices_made_on": "a held-out tenth of the train split; the test split is used once",
        "written": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "environment": environment(),
    }


def checked(limits: Limits) -> Limits:
    """Returns the limits; raises UserError if they leave nothing to measure."""
    least = {"fine_tune_epochs": 1, "fine_tune_images": 0, "lidar_images": 2, "lidar_views": 2, "pictured_points": 10}
    for name, smallest in least.items():
        if getattr(limits, name) < smallest:
            raise UserError(f"--{name}={getattr(limits, name)}: must be at least {smallest}")
    return limits


def without_large_parts(record: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the record for one line of JSON: without matrices, spectra and environment."""
    levels = {
        level: {
            name: {key: value for key, value in result.items() if key not in LARGE} for name, result in results.items()
        }
        for level, results in record["levels"].items()
    }
    return {key: value for key, value in record.items() if key not in ("environment", "classes")} | {"levels": levels}


def _earlier_levels(folder: pathlib.Path, encoder: TrainedEncoder) -> dict[str, Any]:
    """Returns the results in eval.json if they are of the same checkpoint."""
    record = read_json_or_empty(folder / "eval.json")
    same = (record.get("params_sha256"), record.get("step")) == (encoder.digest, encoder.step)
    return record.get("levels", {}) if same else {}


def _finite(value: Any) -> Any:
    """Returns the value with null for numbers that are not finite, which JSON cannot hold."""
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
