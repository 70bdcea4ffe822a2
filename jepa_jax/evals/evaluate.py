"""Evaluates a run: the chosen protocols on the features of its newest checkpoint, at the chosen levels.

Results are written to `eval/eval.json` after each protocol. A second evaluation of the same checkpoint adds to the
first; one that was interrupted goes on after the last protocol that it finished.
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
from jepa_jax.base.files import read_json_or_empty, write_json
from jepa_jax.data.contract import sample
from jepa_jax.evals.features import Split, labels_differ
from jepa_jax.evals.protocols import PROTOCOLS, Limits, parse_levels, parse_protocols
from jepa_jax.evals.references import class_notes, untrained_encoder
from jepa_jax.evals.trained_encoder import TrainedEncoder, load
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
    points: Mapping[int, Split]  # level -> features of some test images
    patches: tuple[np.ndarray, np.ndarray] | None  # images and their patch features [B, gh, gw, F]


def evaluate(
    workdir: str | pathlib.Path,
    *,
    protocols: str = "all",
    levels: str = "all",
    data_dir: str | None = None,
    pool: str | None = None,
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
    encoder = load(workdir, data_dir=data_dir, pool=pool)
    names = parse_protocols(protocols, labelled=bool(encoder.classes))
    chosen = parse_levels(levels, encoder.levels)
    results = Results(encoder.results, encoder, limits)
    compares = limits.untrained and any(PROTOCOLS[name].has_reference for name in names)
    untrained = untrained_encoder(encoder) if compares else None
    for level in chosen:
        if pending := [name for name in names if not results.has(level, name)]:
            measure_level(encoder, untrained, level, pending, results, console)
        if len(pending) < len(names):
            known = ", ".join(PROTOCOLS[name].title for name in names if name not in pending)
            console.line(f"measured before the interruption: {known}")
    names = [name for name in names if all(results.measured(level, name) for level in chosen)]
    if not names:
        raise UserError(f"--protocols={protocols}: {results.notes[0]} Use feature_quality.")
    points: dict[int, Split] = {}
    if "feature_quality" in names and len(encoder.test) >= FEWEST_POINTS:
        points = {level: scatter_points(encoder, level, limits) for level in chosen}
    patches = patch_maps(encoder) if "feature_quality" in names else None
    return Evaluation(
        results.folder, results.finish(time.perf_counter() - started), chosen, names, points, patches=patches
    )


class Results:
    """What eval.json holds: written after each protocol, begun with earlier results of the same checkpoint and data."""

    def __init__(self, folder: pathlib.Path, encoder: TrainedEncoder, limits: Limits):
        self.folder, self.limits = folder, limits
        record, identity = read_json_or_empty(folder / "eval.json"), ("params_sha256", "step", "pool", "data_identity")
        self._record = describe_encoder(encoder, limits)
        is_same = all(record.get(key) == _finite(self._record[key]) for key in identity)
        # A finished evaluation that is asked for again is measured again.
        self._continues = (
            is_same and not record.get("complete", True) and record.get("limits") == self._record["limits"]
        )
        self._record |= {"complete": False, "notes": record["notes"] if is_same else []}
        self._record["levels"] = record["levels"] if is_same else {}
        if not is_same:
            for path in folder.glob("*.png"):  # figures of another checkpoint
                path.unlink()

    def has(self, level: int, name: str) -> bool:
        """Returns whether an interrupted evaluation had measured this protocol."""
        return self._continues and self.measured(level, name)

    def measured(self, level: int, name: str) -> bool:
        return name in self._record["levels"].get(str(level), {})

    @property
    def notes(self) -> list[str]:
        return self._record["notes"]

    def note(self, sentence: str, console: Console) -> None:
        """Keeps a sentence for the pages, and warns of it once."""
        if sentence not in self._record["notes"]:
            self._record["notes"].append(sentence)
            console.warn(sentence)

    def keep(self, level: int, name: str, result: dict[str, Any]) -> None:
        """Writes the results of a protocol."""
        levels = self._record["levels"]
        levels[str(level)] = levels.get(str(level), {}) | {name: result}
        self._record["levels"] = dict(sorted(levels.items(), key=lambda item: int(item[0])))
        self._write()

    def finish(self, seconds: float) -> dict[str, Any]:
        """Marks the evaluation as complete; returns what eval.json holds."""
        self._record |= {"complete": True, "seconds": seconds}
        self._write()
        return _finite(self._record)

    def _write(self) -> None:
        write_json(self.folder / "eval.json", _finite(self._record))


def measure_level(
    encoder: TrainedEncoder,
    untrained: TrainedEncoder | None,
    level: int,
    names: Sequence[str],
    results: Results,
    console: Console,
) -> None:
    """Measures protocols at a level; computes the features first and shows a progress bar for each."""
    where = "" if encoder.levels == 1 else f" (level {level})"
    train, test = extract_features(encoder, level, f"features{where}", console)
    if encoder.classes:
        for sentence in class_notes(train, test, encoder.classes):
            results.note(sentence, console)
        if not labels_differ(train, test):
            names = [name for name in names if not PROTOCOLS[name].needs_labels]
    if "feature_quality" in names:
        encoder.raw_features(level)
    if untrained is not None and any(PROTOCOLS[name].has_reference for name in names):
        extract_features(untrained, level, f"features of the untrained encoder{where}", console)
    for name in names:
        protocol = PROTOCOLS[name]
        reference = untrained if protocol.has_reference else None
        total = protocol.total(encoder, results.limits)
        console.start(f"{protocol.title}{where}", total if reference is None else 2 * total)
        began = time.perf_counter()
        result = protocol.run(encoder, level, results.limits, console.advance)
        if reference is not None:
            result["untrained"] = small_parts(protocol.run(reference, level, results.limits, console.advance))
        result["seconds"] = time.perf_counter() - began
        results.keep(level, name, result)
        console.stop()
        console.line(f"{protocol.title}{where}: {in_words(name, result)}, {result['seconds']:.1f} s")


def extract_features(encoder: TrainedEncoder, level: int, what: str, console: Console) -> tuple[Split, Split]:
    """Returns the features of both splits; shows a progress bar, and a line that says how long it took."""
    console.start(what, len(encoder.train) + len(encoder.test))
    began, hits = time.perf_counter(), encoder.cache.hits
    splits = encoder.features(level, console.advance)
    console.stop()
    origin = "from the cache" if encoder.cache.hits > hits else f"{time.perf_counter() - began:.1f} s"
    console.line(f"{what}: {len(encoder.train):,} train and {len(encoder.test):,} test images, {origin}")
    return splits


def in_words(name: str, result: Mapping[str, Any]) -> str:
    """Returns the most important figure of a protocol."""
    if name == "feature_quality":
        return result["collapse"] or f"effective rank {result['effective_rank']:.1f} of {result['dimensions']:.0f}"
    if name == "few_shot":
        shots = [f"{v['accuracy']:.1f} ± {v['interval_95']:.1f} % ({k}-shot)" for k, v in result["shots"].items()]
        return ", ".join(shots) or "too few images per class"
    low, high = result["interval_95"]
    untrained = f"untrained {result['untrained']['accuracy']:.1f} %, " if "untrained" in result else ""
    return f"{result['accuracy']:.1f} % ({low:.1f} to {high:.1f}), {untrained}chance {result['chance']:.1f} %"


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
        "pool": config.eval.pool,
        "level_names": list(encoder.program.method.level_names),
        "step": encoder.step,
        "params_sha256": encoder.digest,
        "classes": list(encoder.classes),
        "train_images": len(encoder.train),
        "test_images": len(encoder.test),
        "data_identity": encoder.data,
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
        level: {name: small_parts(result) for name, result in results.items()}
        for level, results in record["levels"].items()
    }
    return {key: value for key, value in record.items() if key not in ("environment", "classes")} | {"levels": levels}


def small_parts(result: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the results of a protocol without matrices and spectra."""
    return {key: value for key, value in result.items() if key not in LARGE}


def _finite(value: Any) -> Any:
    """Returns the value with null for numbers that are not finite, which JSON cannot hold."""
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
