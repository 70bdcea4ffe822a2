"""What was measured: the figures of a trial, the row of a sweep, the row of a study.

Names of fields are those of the JSON files, see docs/reference/sweep.schema.json.
"""

import dataclasses
import functools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jepa_jax.base.statistics import speed_interval
from jepa_jax.base.text import short
from jepa_jax.experiments.settings import Combination

OK, OUT_OF_MEMORY, CRASHED, TIMED_OUT, REFUSED = "ok", "out_of_memory", "crashed", "timed_out", "refused"
SKIPPED, PENDING = "skipped", "pending"  # of rows whose trials were not run, or not yet
NEEDED = "a trial of about {} s"  # what a trial says in its log when it knows the time of a step
# Of training runs.
FINISHED, DIVERGED, FAILED = "finished", "diverged", "failed"
KILLED, TIMEOUT, INTERRUPTED = "killed", "timeout", "interrupted"
DONE = (FINISHED, DIVERGED)  # running these again would give the same result

# How the figures of repeats become that of a row.
MEANS = (
    "step_time_p50", "step_time_p95", "cpu_percent", "system_cpu_percent", "gpu_sm_util", "gpu_mem_util",
    "data_wait_fraction", "mfu",
)  # fmt: skip
SUMS = ("samples_processed", "measured_batches", "elapsed_seconds")
MAXIMA = ("peak_memory_bytes", "process_memory_bytes")
# What all repeats of a combination have in common.
SHARED = ("data_source", "program_fingerprint", "pipeline_fingerprint", "platform", "device_limit_bytes")


def known_fields(cls: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the entries of a JSON object that are fields of a dataclass; other versions may have others."""
    return {field.name: values[field.name] for field in dataclasses.fields(cls) if field.name in values}


@dataclasses.dataclass(frozen=True)
class TrialFigures:
    """What one trial measured; None where a figure is not known."""

    samples_per_sec: float
    batches_per_sec: float | None = None
    avg_step_time: float | None = None
    step_time_p50: float | None = None
    step_time_p95: float | None = None
    samples_processed: int | None = None
    measured_batches: int | None = None
    warmup_batches: int | None = None
    discarded_batches: int | None = None
    elapsed_seconds: float | None = None
    cpu_percent: float | None = None
    system_cpu_percent: float | None = None
    gpu_sm_util: float | None = None
    gpu_mem_util: float | None = None
    peak_memory_bytes: int | None = None
    process_memory_bytes: int | None = None
    memory_slope_bytes_per_step: float | None = None
    leak: bool = False
    finite: bool = True
    data_wait_fraction: float | None = None
    notes: tuple[str, ...] = ()
    flops_per_batch: int | None = None
    mfu: float | None = None
    compile_seconds: float | None = None
    compile_cached: bool = False
    program_fingerprint: str | None = None
    pipeline_fingerprint: str | None = None
    data_source: str | None = None
    devices: str | None = None
    platform: str | None = None
    device_limit_bytes: int | None = None
    card: str | None = None  # the GPU that it was measured on, by host and UUID

    @property
    def cold_compile_seconds(self) -> float | None:
        """Seconds of compilation; None if the program came from the cache."""
        return None if self.compile_cached else self.compile_seconds


@dataclasses.dataclass(frozen=True)
class TrialResult:
    """How a trial ended; it has figures if and only if its status is OK.

    As a repeat of a combination it has a round, from 0, whose trials were measured close to each other, and the seconds
    of its whole process, which are None if it ended after its sweep was killed.
    """

    status: str
    reason: str = ""
    figures: TrialFigures | None = None
    round: int = 0
    trial_seconds: float | None = None

    def to_dict(self) -> dict[str, Any]:
        own = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "figures"}
        figures = {} if self.figures is None else dataclasses.asdict(self.figures)
        return own | {name: value for name, value in figures.items() if name != "card" or value is not None}

    def in_words(self) -> str:
        return self.reason if self.figures is None else f"{short(self.figures.samples_per_sec)} samples/s"

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "TrialResult":
        known = known_fields(TrialFigures, values)
        figures = TrialFigures(**known | {"notes": tuple(known.get("notes", ()))}) if values["status"] == OK else None
        seconds = values.get("trial_seconds")
        return cls(values["status"], values["reason"], figures, values.get("round", 0), seconds)


@dataclasses.dataclass(frozen=True)
class SweepRow:
    """A combination with its repeats, and what they say together."""

    combination: Combination
    status: str = PENDING
    reason: str = ""
    repeats: tuple[TrialResult, ...] = ()

    @functools.cached_property
    def figures(self) -> list[TrialFigures]:
        """Figures of the repeats that succeeded."""
        return [repeat.figures for repeat in self.repeats if repeat.figures is not None]

    @functools.cached_property
    def speeds(self) -> dict[int, float]:
        """Images per second of each round that succeeded."""
        return {repeat.round: repeat.figures.samples_per_sec for repeat in self.repeats if repeat.figures is not None}

    @functools.cached_property
    def cards(self) -> dict[int, str]:
        """The GPU of each round that succeeded, where it is known."""
        return {one.round: one.figures.card for one in self.repeats if one.figures is not None and one.figures.card}

    @property
    def is_measured(self) -> bool:
        return self.status == OK and bool(self.figures)

    @property
    def samples_per_sec(self) -> float | None:
        return statistics.geometric_mean(self.speeds.values()) if self.speeds else None

    @property
    def samples_per_sec_ci95(self) -> tuple[float, float] | None:
        return speed_interval(list(self.speeds.values()))

    @property
    def memory_bytes(self) -> float:
        """The largest peak: of the device, or of the processes where no device peak is known; infinite if neither."""
        return float(self.largest("peak_memory_bytes") or self.largest("process_memory_bytes") or math.inf)

    @property
    def finite(self) -> bool:
        """Whether every loss that was seen is finite."""
        return all(figures.finite for figures in self.figures)

    @property
    def leak(self) -> bool:
        """Whether memory grew from step to step in at least half of the repeats."""
        return 2 * sum(figures.leak for figures in self.figures) >= len(self.figures) > 0

    def known(self, name: str) -> list[Any]:
        """Returns a figure of every repeat that has it."""
        return [value for figures in self.figures if (value := getattr(figures, name)) is not None]

    def mean(self, name: str) -> float | None:
        values = self.known(name)
        return statistics.fmean(values) if values else None

    def largest(self, name: str) -> Any:
        return max(self.known(name), default=None)

    def shared(self, name: str) -> Any:
        """Returns a figure that all repeats have in common."""
        return next(iter(self.known(name)), None)

    def same_execution(self, other: "SweepRow") -> bool:
        """Returns whether both run the same compiled program, fed by the same pipeline."""
        prints = ("program_fingerprint", "pipeline_fingerprint")
        return all(self.shared(name) and self.shared(name) == other.shared(name) for name in prints)

    def with_repeat(self, repeat: TrialResult) -> "SweepRow":
        """Returns the row with one more repeat; the first that failed decides for the whole row."""
        repeats = (*self.repeats, repeat)
        if self.status not in (PENDING, OK, SKIPPED):
            return SweepRow(self.combination, self.status, self.reason, repeats)
        later = repeat.status != OK and self.repeats
        reason = f"repeat {len(repeats)}: {repeat.reason}" if later else repeat.reason
        return SweepRow(self.combination, repeat.status, reason, repeats)

    def without_failures(self) -> "SweepRow":
        """Returns the row with the repeats that succeeded, as if it had neither failed nor been skipped."""
        good = tuple(repeat for repeat in self.repeats if repeat.status == OK)
        return SweepRow(self.combination, OK if good else PENDING, "", good)

    def to_dict(self, compile_seconds: Mapping[str, float] | None = None) -> dict[str, Any]:
        """Returns the row as JSON has it; `compile_seconds` of each program by its fingerprint."""
        speed, interval, batch_size = self.samples_per_sec, self.samples_per_sec_ci95, self.combination.batch_size
        slopes = self.known("memory_slope_bytes_per_step")
        return {
            "combination": self.combination.to_dict(),
            "status": self.status,
            "reason": self.reason,
            "samples_per_sec": speed,
            "samples_per_sec_ci95": list(interval) if interval else None,
            "batches_per_sec": speed / batch_size if speed else None,
            "avg_step_time": batch_size / speed if speed else None,
            **{name: self.mean(name) for name in MEANS},
            "compile_seconds": (compile_seconds or {}).get(self.shared("program_fingerprint")),
            **{name: sum(values) if (values := self.known(name)) else None for name in SUMS},
            **{name: self.largest(name) for name in MAXIMA},
            "memory_slope_bytes_per_step": statistics.median(slopes) if slopes else None,
            "leak": self.leak,
            "finite": self.finite,
            **{name: self.shared(name) for name in SHARED},
            "notes": list(dict.fromkeys(note for figures in self.figures for note in figures.notes)),
            "repeats": [repeat.to_dict() for repeat in self.repeats],
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "SweepRow":
        repeats = tuple(TrialResult.from_dict(repeat) for repeat in values["repeats"])
        return cls(Combination.from_dict(values["combination"]), values["status"], values["reason"], repeats)


def rows_to_json(rows: Iterable[SweepRow]) -> list[dict[str, Any]]:
    """Returns rows as JSON has them; the compile time of a program is that of the row for which it was compiled."""
    rows = list(rows)
    cold = {
        figures.program_fingerprint: seconds
        for row in rows
        for figures in row.figures
        if (seconds := figures.cold_compile_seconds) and figures.program_fingerprint
    }
    return [row.to_dict(cold) for row in rows]


def skip_larger(rows: Sequence[SweepRow], index: int) -> list[SweepRow]:
    """Skips the larger batches, all else equal, if the trial of row `index` ran out of memory; returns all rows."""
    small = rows[index]
    if small.status != OUT_OF_MEMORY:
        return list(rows)
    reason = f"larger than a trial that ran out of memory: {small.combination.label}"

    def is_larger(row: SweepRow) -> bool:
        with_small_batch = dataclasses.replace(row.combination, batch_size=small.combination.batch_size)
        return row.combination.batch_size > small.combination.batch_size and with_small_batch == small.combination

    return [
        dataclasses.replace(row, status=SKIPPED, reason=reason) if row.status == PENDING and is_larger(row) else row
        for row in rows
    ]


@dataclasses.dataclass(frozen=True)
class StudyRow:
    """One training run: the values it was given, how it ended, and its results (None where there are none).

    `attempt_seconds` is the time of the last of `attempts`.
    """

    name: str
    lr: float | None  # None where the study keeps the learning rate of the config
    epochs: int
    seed: int
    status: str = PENDING
    reason: str = ""
    exit_code: int | None = None
    attempts: int = 0
    attempt_seconds: float = 0.0
    probe_held_out_accuracy: float | None = None
    untrained_probe_held_out_accuracy: float | None = None
    probe_accuracy: float | None = None  # on the test split: nothing is chosen by it
    untrained_probe_accuracy: float | None = None
    knn_accuracy: float | None = None
    validation_loss: float | None = None
    wall_seconds: float | None = None
    cpu_seconds: float | None = None
    steps: int | None = None
    final_loss: float | None = None

    def to_dict(self) -> dict[str, Any]:
        values = dataclasses.asdict(self)
        return values if self.lr is not None else {key: value for key, value in values.items() if key != "lr"}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "StudyRow":
        return cls(**{"lr": None, **known_fields(cls, values)})
