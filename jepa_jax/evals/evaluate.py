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
from typing import Any, NamedTuple

import numpy as np

from jepa_jax.base.console import Console
from jepa_jax.base.errors import UserError
from jepa_jax.base.files import read_json_or_empty, write_json
from jepa_jax.data.contract import MAP, element_names, sample, target_names
from jepa_jax.evals.evaluators import (
    EncoderEvaluator,
    EvaluationContext,
    Limits,
    Moment,
    Stage,
    calibration_images_at_start,
    level_words,
)
from jepa_jax.evals.feature_quality import FeatureQuality
from jepa_jax.evals.features import Split, class_notes, labels_differ
from jepa_jax.evals.few_shot import FewShot
from jepa_jax.evals.fine_tune import FineTune
from jepa_jax.evals.inference import FrozenEncoder, TrainedRun, load_run
from jepa_jax.evals.knn import NearestNeighbours
from jepa_jax.evals.linear_probe import LayersProbe, LinearProbe
from jepa_jax.evals.neighbours import MAPPED, shown_places, small_copies
from jepa_jax.evals.ridge_probe import RidgeProbe
from jepa_jax.evals.token_probes import AttentiveProbe, SegmentationProbe
from jepa_jax.program.checkpoint import params_sha256
from jepa_jax.program.step import TrainState, evaluated_variables
from jepa_jax.runtime.provenance import environment

PROTOCOLS: Mapping[str, type[EncoderEvaluator]] = {
    "linear_probe": LinearProbe,
    "last_layers": LayersProbe,
    "attentive_probe": AttentiveProbe,
    "segmentation_probe": SegmentationProbe,
    "ridge_probe": RidgeProbe,
    "knn": NearestNeighbours,
    "feature_quality": FeatureQuality,
    "fine_tune": FineTune,
    "few_shot": FewShot,
}
LARGE = ("confusion", "sweep", "spectrum")  # parts of results that no terminal shows
FEWEST_POINTS = 10  # of a scatter plot
PICTURED_IMAGES = 8  # whose attention is shown


class Examples(NamedTuple):
    """What an encoder makes of the patches of some test images."""

    images: np.ndarray  # [N, H, W, C] in uint8
    patches: np.ndarray  # features [N, rows, columns, F]
    attention: np.ndarray  # of the last block [N, heads, rows, columns]


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """The results of an evaluation, and the arrays that its figures show."""

    folder: pathlib.Path
    record: dict[str, Any]  # what eval.json holds: these results and earlier ones of the same checkpoint
    levels: Sequence[int]  # that were measured now
    protocols: Sequence[str]  # that were measured now
    points: Mapping[int, Split]  # level -> features of some test images
    examples: Examples | None = None  # if they were asked for
    mapped: np.ndarray | None = None  # small copies of the first images of `points`
    neighbours: Mapping[int, np.ndarray] = dataclasses.field(default_factory=dict)  # level -> rows of small copies


def evaluate(
    workdir: str | pathlib.Path,
    *,
    protocols: str = "all",
    levels: str = "all",
    data_dir: str | None = None,
    pool: str | None = None,
    data_source: str | None = None,
    limits: Limits | None = None,
    attention: bool = False,
    console: Console,
) -> Evaluation:
    """Measures the newest checkpoint of a run; with `attention`, also shows what its last block attends to.

    With `data_source`, on another data set than that of the run (transfer).

    Raises UserError for an unknown protocol or level, for missing data, and for an encoder without attention.
    """
    started = time.perf_counter()
    parse_protocols(protocols)  # a misspelled name is reported before anything is loaded
    run = load_run(workdir, data_dir=data_dir, pool=pool, data_source=data_source)
    encoder = run.encoder
    given = {
        "labels": bool(encoder.train.classes), "targets": bool(target_names(encoder.train)),
        "maps": MAP in encoder.train.spec, "patches": encoder.has_patches, "layers": encoder.has_layers,
    }  # fmt: skip
    names = parse_protocols(protocols, [kind for kind, there in given.items() if there])
    chosen = parse_levels(levels, encoder.program.method.levels)
    examples = None
    if attention:
        if "image" not in encoder.test.spec:
            raise UserError("--attention: shows images, which the data has not; leave it out")
        images = encoder.test.batch(sample(len(encoder.test), PICTURED_IMAGES))["image"]
        maps = encoder.attention_maps(images)  # refuses an encoder that has none
        examples = Examples(images, encoder.patch_tokens(images), maps)
    measurement = Measurement(run, names, limits or Limits(), console)
    for level in chosen:
        measurement.measure_level(level)
    record = measurement.record
    names = [name for name in names if any(name in record["levels"].get(str(level), {}) for level in chosen)]
    if not names:
        raise UserError(f"--protocols={protocols}: {record['notes'][-1]} Use feature_quality.")
    points: dict[int, Split] = {}
    neighbours: dict[int, np.ndarray] = {}
    mapped = None
    if "feature_quality" in names and len(encoder.test) >= FEWEST_POINTS:
        shown = np.random.default_rng(0).permutation(sample(len(encoder.test), measurement.limits.pictured_points))
        points = {level: encoder.test_features(level).part(shown) for level in chosen}
        if "image" in encoder.test.spec:
            mapped = small_copies(encoder.test, shown[:MAPPED])
            for level, split in points.items():
                neighbours[level] = small_copies(encoder.test, shown[shown_places(split.features)])
    measurement.write(complete=True, seconds=time.perf_counter() - started)
    return Evaluation(run.results, measurement.record, chosen, names, points, examples, mapped, neighbours)


def parse_protocols(text: str, given: Sequence[str] = ("labels", "targets", "maps", "patches", "layers")) -> list[str]:
    """Returns the protocols of names separated by commas, or of `all`: those that data and encoder allow.

    The attentive probe, which runs the encoder on every image in every epoch, is used only if it is named.
    """
    possible = [name for name, one in PROTOCOLS.items() if {one.needs, one.reads} <= {"", *given}]
    names = [name.strip() for name in text.split(",")]
    if names == ["all"]:
        names = [name for name in possible if name != "attentive_probe"]
    for name in names:
        if name not in PROTOCOLS:
            raise UserError(f"--protocols={text}: {name!r} is no protocol; use all, or some of {','.join(PROTOCOLS)}")
        if name not in possible:
            needs, reads = PROTOCOLS[name].needs, PROTOCOLS[name].reads
            lacks = f"{reads}, which the encoder has not" if needs in given else f"{needs}, which the data has not"
            raise UserError(f"--protocols={text}: {name} needs {lacks}; use {','.join(possible)}")
    return [name for name in PROTOCOLS if name in names]


def parse_levels(text: str, levels: int) -> list[int]:
    """Returns the levels of `all`, or of numbers separated by commas."""
    known = [str(level) for level in range(levels)]
    names = known if text.strip() == "all" else [name.strip() for name in text.split(",")]
    for name in names:
        if name not in known:
            has = "level 0 alone" if levels == 1 else f"levels {', '.join(known)}"
            raise UserError(f"--levels={text}: {name!r} is no level; this method has {has}; use all or some of them")
    return sorted({int(name) for name in names})


class Measurement:
    """Measures the trained encoder and, where a protocol compares, the untrained one; writes eval.json after each.

    Attributes:
      record: what eval.json holds; begun with earlier results of the same checkpoint and data.
    """

    def __init__(self, run: TrainedRun, names: Sequence[str], limits: Limits, console: Console):
        encoder = run.encoder
        config = encoder.config
        context = EvaluationContext(
            config, encoder.program, (encoder.train, encoder.test), progress=console, limits=limits
        )
        context.remember(run.state, config.eval.calibration_images, encoder)  # calibrated when it was saved
        self.limits, self.console, self._path = limits, console, run.results / "eval.json"
        self.evaluators = {name: PROTOCOLS[name](context) for name in names}
        self.trained: tuple[TrainState, FrozenEncoder] = run.state, encoder
        self.untrained: tuple[TrainState, FrozenEncoder] | None = None
        if any(one.due(Moment(Stage.UNTRAINED, 0, 0)) for one in self.evaluators.values()):
            state, images = run.initial_state(), calibration_images_at_start(config)
            fresh = encoder.with_weights(*evaluated_variables(state, config.eval.weights))
            fresh = dataclasses.replace(fresh.calibrated(encoder.train, images), store=run.cache.renamed("untrained"))
            self.untrained = state, context.remember(state, images, fresh)
        self.record: dict[str, Any] = {
            "method": config.method.name,
            "model": config.model.name,
            "data": config.data.source,
            "elements": element_names(encoder.train).elements,
            "weights": config.eval.weights,
            "pool": config.eval.pool,
            "level_names": list(encoder.program.method.level_names),
            "step": int(run.state.step),
            "params_sha256": params_sha256(encoder.params),
            "classes": list(encoder.train.classes),
            "train_images": len(encoder.train),
            "test_images": len(encoder.test),
            "data_identity": run.data,
            "limits": dataclasses.asdict(limits),
            "choices_made_on": "a held-out tenth of the train split; the test split is used once",
            "written": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
            "environment": environment(),
            "complete": False,
            "notes": [],
            "levels": {},
        }
        if run.trained_on != config.data.source:
            self.record["notes"].append(f"Transfer: the encoder was trained on {run.trained_on}, not on this data.")
        found = read_json_or_empty(self._path)
        is_same = all(
            found.get(key) == _finite(self.record[key]) for key in ("params_sha256", "step", "pool", "data_identity")
        )
        # A finished evaluation that is asked for again is measured again.
        continues = is_same and not found.get("complete", True) and found.get("limits") == self.record["limits"]
        self._before_interruption: dict[str, Any] = dict(found["levels"]) if continues else {}
        if is_same:
            self.record |= {"notes": found["notes"], "levels": found["levels"]}
        else:
            for path in (
                path for kind in ("svg", "png", "npz") for path in run.results.glob(f"*.{kind}")
            ):  # figures of another checkpoint
                path.unlink()

    def write(self, **changes: Any) -> None:
        """Writes eval.json."""
        self.record = _finite(self.record | changes)
        write_json(self._path, self.record)

    def measure_level(self, level: int) -> None:
        """Measures protocols at a level; computes the features first and shows a progress bar for each."""
        state, encoder = self.trained
        known = self._before_interruption.get(str(level), {})
        evaluators = {name: one for name, one in self.evaluators.items() if level == 0 or one.has_levels}
        evaluators = {name: one for name, one in evaluators.items() if name not in known}
        if len(evaluators) < len(self.evaluators):
            titles = ", ".join(one.title for name, one in self.evaluators.items() if name in known)
            self.console.line(f"measured before the interruption: {titles}")
        if not evaluators:
            return
        train, test = self._extract(encoder, level, "features")
        if encoder.train.classes:
            for sentence in class_notes(train, test, encoder.train.classes):
                if sentence not in self.record["notes"]:
                    self.record["notes"].append(sentence)
                    self.console.warn(sentence)
            if not labels_differ(train, test):
                evaluators = {name: one for name, one in evaluators.items() if one.needs != "labels"}
        if "feature_quality" in evaluators:
            self.console.start("features before normalisation", None)
            encoder.raw_features(level)
        before = Moment(Stage.UNTRAINED, 0, 0, level)
        if self.untrained and any(one.due(before) for one in evaluators.values()):
            self._extract(self.untrained[1], level, "features of the untrained encoder")
        for name, evaluator in evaluators.items():
            began = time.perf_counter()
            result = evaluator.run(state, Moment(Stage.FINAL, int(state.step), 0, level))
            if self.untrained and evaluator.due(before):
                result["untrained"] = small_parts(evaluator.run(self.untrained[0], before))
            result["seconds"] = time.perf_counter() - began
            levels = self.record["levels"]
            levels[str(level)] = levels.get(str(level), {}) | {name: result}
            self.write(levels=dict(sorted(levels.items(), key=lambda item: int(item[0]))))
            self.console.stop()
            words = f"{evaluator.in_words(result)}, {result['seconds']:.1f} s"
            self.console.line(f"{evaluator.title}{level_words(encoder, level)}: {words}")

    def _extract(self, encoder: FrozenEncoder, level: int, what: str) -> tuple[Split, Split]:
        """Returns the features of both splits; shows a progress bar, and a line that says how long it took."""
        what += level_words(encoder, level)
        self.console.start(what, len(encoder.train) + len(encoder.test))
        began, hits = time.perf_counter(), encoder.store.hits
        splits = encoder.features(level, self.console.advance)
        self.console.stop()
        origin = "from the cache" if encoder.store.hits > hits else f"{time.perf_counter() - began:.1f} s"
        elements = element_names(encoder.train).elements
        self.console.line(f"{what}: {len(encoder.train):,} train and {len(encoder.test):,} test {elements}, {origin}")
        return splits


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
