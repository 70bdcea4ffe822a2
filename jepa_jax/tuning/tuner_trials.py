"""The trials of a search: run one at a time while there is time, kept, and read as the rows of a sweep."""

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jepa_jax.tuning import choice
from jepa_jax.tuning.noise import Fit, compare, fit, speeds
from jepa_jax.tuning.sweep_rows import summarised
from jepa_jax.tuning.trial import KNOBS, OK, OUT_OF_MEMORY, TIMED_OUT, Combination, TrialRequest

Measurement = Mapping[str, Any]
Run = Callable[[TrialRequest, float], Measurement]  # a trial, and the seconds it may take
Trial = dict[str, Any]  # combination, round, with_evaluation, seconds, result

SHORT_SECONDS = 4.0  # of measured steps
FEWEST_BATCHES, MOST_BATCHES, WARMUP_BATCHES = 8, 96, 3
SMALLEST_LIMIT = 20.0  # seconds that any trial gets
PATIENCE = 5.0  # times the usual length of a trial, after which it counts as hanging
MOST_RESERVE = 0.4  # of the budget, kept for later


@dataclasses.dataclass(frozen=True)
class Limits:
    """What the search may use."""

    budget_seconds: float
    memory_bytes: float | None = None
    margin: float = 0.08  # of the memory, left free
    is_guess: bool = False  # that `memory_bytes` is, until a trial has read what the device's allocator has

    @property
    def usable_bytes(self) -> float:
        return math.inf if self.memory_bytes is None else self.memory_bytes * (1 - self.margin)

    def with_device(self, device_bytes: float | None) -> "Limits":
        """By what a trial has read, if anything: that in place of a guess, and never more than it."""
        if device_bytes is None:
            return self
        known = math.inf if self.is_guess or self.memory_bytes is None else self.memory_bytes
        return dataclasses.replace(self, memory_bytes=min(device_bytes, known), is_guess=False)


class Trials:
    """`trials` holds everything measured so far, in order; given back as `recorded` it is not measured again."""

    def __init__(
        self,
        config: Mapping[str, Any],
        limits: Limits,
        run: Run,
        *,
        use_dummy_data: bool = False,
        gpu_index: int | None = None,
        recorded: Iterable[Trial] = (),
        on_trial: Callable[[list[Trial], str], None] = lambda trials, stage: None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """`recorded`: trials of an earlier search; the same decisions find them again, and their time counts."""
        self.config, self.limits = config, limits
        self._run, self._on_trial, self._clock = run, on_trial, clock
        self._options: dict[str, Any] = {"use_dummy_data": use_dummy_data, "gpu_index": gpu_index}
        recorded = list(recorded)
        self._recorded = {identity(trial): trial for trial in recorded if not trial.get("cut")}
        self.cut = [trial for trial in recorded if trial.get("cut")]  # ended with the budget: only their time counts
        self._spent_before = sum(trial["seconds"] for trial in recorded)
        self._began = clock()
        self.round, self.stage = 1, "reference"
        self.reserved_trials = 0.0  # of usual length, that have to be possible afterwards
        self.trials: list[Trial] = []
        self._known: tuple[int, dict[Combination, dict[str, Any]], Fit] | None = None
        self.untried: list[Combination] = []

    def seconds_left(self) -> float:
        return self.limits.budget_seconds - self._spent_before - (self._clock() - self._began)

    def _reserve(self) -> float:
        return min(MOST_RESERVE * self.limits.budget_seconds, self.reserved_trials * self._warm_seconds())

    def _warm_seconds(self) -> float:
        """What a trial usually takes whose program was compiled before; 0 before the first."""
        good = [trial for trial in self.trials if trial["result"]["status"] == OK]
        warm = [trial["seconds"] - _compiling(trial) for trial in good]
        return statistics.median(warm) if warm else 0.0

    def _expected_seconds(self, combination: Combination) -> float:
        programs = {program_of(Combination.from_dict(trial["combination"])) for trial in self.trials}
        compiling = [seconds for trial in self.trials if (seconds := _compiling(trial))]
        cold = statistics.median(compiling) if compiling and program_of(combination) not in programs else 0.0
        return self._warm_seconds() + cold

    def measure(self, combination: Combination, seconds: float = SHORT_SECONDS, confirming: bool = False) -> bool:
        """One trial of this round; False if there was no time for it. What came out is in `rows`."""
        known = self._recorded.get((combination, self.round, confirming))
        if known:
            self._keep(known)
            return True
        available = self.seconds_left() - self._reserve()
        if available < max(self._expected_seconds(combination), 1e-9):
            self.untried.append(combination)
            return False
        patience = PATIENCE * self._expected_seconds(combination) or available / 2  # nothing is known of the first
        limit = min(max(SMALLEST_LIMIT, patience), max(SMALLEST_LIMIT, available))
        request = TrialRequest(
            config=self.config,
            combination=combination,
            max_batches=self._batches(combination, seconds),
            warmup_batches=WARMUP_BATCHES,
            with_evaluation=confirming,
            **self._options,
        )
        began = self._clock()
        result = dict(self._run(request, limit))
        took = self._clock() - began
        trial = {
            "combination": combination.as_dict(), "round": self.round, "with_evaluation": confirming,
            "seconds": took, "result": result,
        }  # fmt: skip
        if result["status"] == TIMED_OUT and limit < patience:
            self.untried.append(combination)  # the budget ended, which says nothing of the combination
            self.cut.append({**trial, "cut": True})
            return False
        self._keep(trial)
        self._on_trial(self.trials, self.stage)
        return True

    def _keep(self, trial: Trial) -> None:
        self.trials.append(trial)
        self.limits = self.limits.with_device(trial["result"].get("device_limit_bytes"))

    def _batches(self, combination: Combination, seconds: float) -> int:
        """So many that the measured steps take about `seconds`, by what is known of this or any combination."""
        rows = self.rows()
        row = rows.get(combination) or max(
            (row for row in rows.values() if row["samples_per_sec"]), key=lambda r: r["samples_per_sec"], default=None
        )
        if not row or not row["samples_per_sec"]:
            return FEWEST_BATCHES
        return round(min(max(seconds * row["samples_per_sec"] / combination.batch_size, FEWEST_BATCHES), MOST_BATCHES))

    def rows(self) -> dict[Combination, dict[str, Any]]:
        return self._read()[0]

    def _read(self) -> tuple[dict[Combination, dict[str, Any]], Fit]:
        """Rows and their fit; made anew only after a trial."""
        if self._known is None or self._known[0] != len(self.trials):
            rows = rows_of(self.trials)
            self._known = len(self.trials), rows, fit(list(rows.values()))
        return self._known[1:]

    def unused(self) -> list[Trial]:
        """Recorded trials that this search has not come to: kept, in case it is interrupted before."""
        used = {identity(trial) for trial in self.trials}
        return [trial for key, trial in self._recorded.items() if key not in used]

    def works(self, combination: Combination) -> bool:
        """Measured, with a finite loss, within the memory less its margin, without a leak."""
        row = self.rows().get(combination)
        return bool(row and row["status"] == OK and speeds(row) and not self.what_is_wrong(row))

    def fits(self, row: Mapping[str, Any]) -> bool:
        memory = choice.memory_of(row)
        return not math.isfinite(memory) or memory <= self.limits.usable_bytes

    def ratio(self, a: Combination, b: Combination) -> float:
        rows, model = self._read()
        found = compare(rows[a], rows[b], model).ratio
        return found if math.isfinite(found) else rows[a]["samples_per_sec"] / rows[b]["samples_per_sec"]

    def ranked(self, combinations: Iterable[Combination] | None = None) -> list[Combination]:
        """Those that work, the fastest first."""
        rows, model = self._read()
        pool = [c for c in (rows if combinations is None else combinations) if self.works(c)]
        return sorted(pool, key=lambda combination: -model.effect(rows[combination]))

    def expected_bytes(self, combination: Combination) -> float:
        """Memory by the line through the two largest parts measured with this precision and remat.

        With a single point the line goes through zero: what does not grow with the batch then counts as if it did, so
        the expectation is not too low. A trial that ran out of memory is a point at the limit. Without a point the
        expectation is 0: only a trial can tell.
        """
        points: dict[float, float] = {}
        for other, row in self.rows().items():
            memory = self.limits.memory_bytes if row["status"] == OUT_OF_MEMORY else choice.memory_of(row)
            alike = (other.precision, other.remat) == (combination.precision, combination.remat)
            if alike and row["status"] in (OK, OUT_OF_MEMORY) and memory and math.isfinite(memory):
                points[part_of(other)] = max(memory, points.get(part_of(other), 0.0))
        if not points:
            return 0.0
        x, memory = max(points.items())
        smaller = max((point for point in points.items() if point[0] < x), default=(0.0, 0.0))
        slope = max(0.0, (memory - smaller[1]) / (x - smaller[0]))
        return memory + slope * (part_of(combination) - x)

    def expected_to_fit(self, combination: Combination) -> bool:
        return self.expected_bytes(combination) <= self.limits.usable_bytes

    def why_not(self, combination: Combination) -> str:
        row = self.rows().get(combination, {})
        if row.get("status") != OK:
            return row.get("reason") or row.get("status") or "not measured"
        return self.what_is_wrong(row)

    def what_is_wrong(self, measured: Mapping[str, Any]) -> str:
        """With a row or a result that has its figures; empty if nothing is."""
        if not choice.is_finite(measured):
            return "its loss is not finite"
        if measured.get("leak"):
            return "its memory grows from step to step"
        return "" if self.fits(measured) else "it takes more memory than is allowed"


def rows_of(trials: Iterable[Trial]) -> dict[Combination, dict[str, Any]]:
    """A row of a sweep for every combination tried; the confirming run is a repeat like others, a failure decides."""
    repeats: dict[Combination, list[dict[str, Any]]] = {}
    for trial in trials:
        found = repeats.setdefault(Combination.from_dict(trial["combination"]), [])
        found.append({"round": trial["round"], **trial["result"]})
    rows = {}
    for combination, found in repeats.items():
        end = next((repeat for repeat in found if repeat["status"] != OK), found[0])
        head = {"combination": combination.as_dict(), "status": end["status"], "reason": end["reason"]}
        rows[combination] = summarised({**head, "repeats": found})
    return rows


def part_of(combination: Combination) -> float:
    """Images computed at a time."""
    return combination.batch_size / combination.grad_accum_steps


def program_of(combination: Combination) -> tuple:
    """What decides which program is compiled."""
    return dataclasses.astuple(dataclasses.replace(combination, num_workers=0, pipeline=""))


def _compiling(trial: Trial) -> float:
    result = trial["result"]
    return 0.0 if result.get("compile_cached") else result.get("compile_seconds") or 0.0


def changes(a: Combination, b: Combination) -> list[tuple[str, Any]]:
    """The knobs in which b differs from a, and their values in b; workers do not count where there is no loader."""
    names = [name for name in KNOBS if name != "num_workers" or b.pipeline != "device"]
    return [(name, getattr(b, name)) for name in names if getattr(a, name) != getattr(b, name)]


def identity(trial: Trial) -> tuple[Combination, int, bool]:
    return Combination.from_dict(trial["combination"]), trial["round"], trial["with_evaluation"]
