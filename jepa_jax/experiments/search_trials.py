"""The trials of a search: they run while there is time, and what they showed of speed and memory is kept.

The machine is a function (`RunTrial`), so that tests can search on machines that are formulas.
"""

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jepa_jax.base.statistics import SpeedModel, compare_speeds, fit_speeds
from jepa_jax.experiments.recommendation import WAITING
from jepa_jax.experiments.rows import OK, OUT_OF_MEMORY, SKIPPED, TIMED_OUT, SweepRow, TrialResult, known_fields
from jepa_jax.experiments.settings import Combination, TrialRequest

RunTrial = Callable[[TrialRequest, float], TrialResult]  # runs a trial within a limit of seconds

SHORT_SECONDS = 4.0  # of measured steps
FEWEST_BATCHES, MOST_BATCHES, WARMUP_BATCHES = 8, 96, 3
SMALLEST_LIMIT = 20.0  # seconds that any trial gets
PATIENCE = 5.0  # times the usual length of a trial, after which it counts as hanging
MOST_RESERVE = 0.4  # of the budget, kept for later


@dataclasses.dataclass(frozen=True)
class SearchLimits:
    """Time and memory that a search may use.

    Attributes:
      margin: share of the memory that stays free.
      is_guess: `memory_bytes` is an estimate, until a trial has read what the device's allocator has.
    """

    budget_seconds: float
    memory_bytes: float | None = None
    margin: float = 0.08
    is_guess: bool = False

    @property
    def usable_bytes(self) -> float:
        return math.inf if self.memory_bytes is None else self.memory_bytes * (1 - self.margin)

    def with_device(self, device_bytes: float | None) -> "SearchLimits":
        """Returns limits by what a trial has read, if anything: it replaces a guess, and is never exceeded."""
        if device_bytes is None:
            return self
        known = math.inf if self.is_guess or self.memory_bytes is None else self.memory_bytes
        return dataclasses.replace(self, memory_bytes=min(device_bytes, known), is_guess=False)


@dataclasses.dataclass(frozen=True)
class SearchTrial:
    """A trial of a search, as tune.json keeps it."""

    combination: Combination
    round: int
    with_evaluation: bool
    seconds: float
    result: TrialResult

    @property
    def key(self) -> tuple[Combination, int, bool]:
        return self.combination, self.round, self.with_evaluation

    @property
    def compile_seconds(self) -> float:
        figures = self.result.figures
        return (figures.cold_compile_seconds or 0.0) if figures else 0.0

    def to_dict(self) -> dict[str, Any]:
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return values | {"combination": self.combination.to_dict(), "result": self.result.to_dict()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "SearchTrial":
        combination, result = Combination.from_dict(values["combination"]), TrialResult.from_dict(values["result"])
        return cls(**known_fields(cls, values) | {"combination": combination, "result": result})


class Trials:
    """Runs trials while there is time, and keeps them in order as the rows of a sweep."""

    def __init__(
        self,
        given: TrialRequest,
        limits: SearchLimits,
        run: RunTrial,
        *,
        recorded: Sequence[SearchTrial] = (),
        on_trial: Callable[[SearchTrial], None] = lambda trial: None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Starts without trials, or with those `recorded` of an earlier search, whose time counts.

        `given` is a trial of the settings as given, of which every request is a change; `on_trial` is called after each
        trial.
        """
        self.given, self.limits = given, limits
        self._run, self._on_trial, self._clock = run, on_trial, clock
        # A trial that ran out of time says nothing about its settings: it is tried again, and only its time counts.
        self.out_of_time = [trial for trial in recorded if trial.result.status == TIMED_OUT]
        self._recorded = {trial.key: trial for trial in recorded if trial.result.status != TIMED_OUT}
        self._spent_before = sum(trial.seconds for trial in recorded)
        self._began = clock()
        self.round = 1
        self.reserved_trials = 0.0  # of usual length, which have to be possible afterwards
        self.trials: list[SearchTrial] = []
        self.rows: dict[Combination, SweepRow] = {}  # of all trials, the confirming ones too
        self.model: SpeedModel = fit_speeds([])
        self._skipped: list[Combination] = []  # for lack of time

    @property
    def untried(self) -> list[Combination]:
        """Settings that there was no time for."""
        return [c for c in dict.fromkeys(self._skipped) if c not in self.rows]

    def seconds_spent(self) -> float:
        return self._spent_before + self._clock() - self._began

    def seconds_left(self) -> float:
        return self.limits.budget_seconds - self.seconds_spent()

    def all_trials(self) -> list[SearchTrial]:
        """Returns the trials to record, also those that an interrupted search has not come to again."""
        used = {trial.key for trial in self.trials}
        unused = [trial for key, trial in self._recorded.items() if key not in used]
        return [*self.trials, *unused, *self.out_of_time]

    def measure(self, combination: Combination, seconds: float = SHORT_SECONDS, confirming: bool = False) -> bool:
        """Runs a trial of this round, and returns False if there was no time for it; its result is in `rows`.

        One that takes far longer than others is left out of this search, but not counted as a failure.
        """
        known = self._recorded.get((combination, self.round, confirming))
        if known:
            self._keep(known)
            return True
        expected = self._expected_seconds(combination)
        available = self.seconds_left() - min(
            MOST_RESERVE * self.limits.budget_seconds, self.reserved_trials * self._warm_seconds()
        )
        if available < max(expected, 1e-9):
            self._skipped.append(combination)
            return False
        patience = PATIENCE * expected or math.inf  # nothing is known of the first
        limit = min(max(SMALLEST_LIMIT, patience), max(SMALLEST_LIMIT, available))
        batches = self._batches(combination, seconds)
        request = dataclasses.replace(
            self.given, combination=combination, max_batches=batches, with_evaluation=confirming
        )
        began = self._clock()
        result = self._run(request, limit)
        trial = SearchTrial(combination, self.round, confirming, self._clock() - began, result)
        is_late = result.status == TIMED_OUT
        is_out_of_time = is_late and (limit < patience or confirming)
        if is_out_of_time:
            self._skipped.append(combination)
        elif is_late:
            self.rows.setdefault(combination, SweepRow(combination, SKIPPED, result.reason))
        if is_late:
            self.out_of_time.append(trial)
        else:
            self._keep(trial)
        self._on_trial(trial)
        return not is_out_of_time

    def _keep(self, trial: SearchTrial) -> None:
        self.trials.append(trial)
        figures = trial.result.figures
        self.limits = self.limits.with_device(figures.device_limit_bytes if figures else None)
        repeat = dataclasses.replace(trial.result, round=trial.round, trial_seconds=round(trial.seconds, 3))
        self.rows[trial.combination] = self.rows.get(trial.combination, SweepRow(trial.combination)).with_repeat(repeat)
        self.model = fit_speeds(list(self.rows.values()))

    def _warm_seconds(self) -> float:
        """Returns the usual length of a trial whose program was compiled before; 0 before the first."""
        warm = [trial.seconds - trial.compile_seconds for trial in self.trials if trial.result.status == OK]
        return statistics.median(warm) if warm else 0.0

    def _expected_seconds(self, combination: Combination) -> float:
        programs = {program_of(trial.combination) for trial in self.trials}
        compiling = [trial.compile_seconds for trial in self.trials if trial.compile_seconds]
        is_cold = self.given.compile_anew or program_of(combination) not in programs
        cold = statistics.median(compiling) if compiling and is_cold else 0.0
        return self._warm_seconds() + cold

    def _batches(self, combination: Combination, seconds: float) -> int:
        """Returns how many batches take about `seconds`, by the speed of this combination, or of the fastest."""
        rows = self.rows
        own = rows[combination].samples_per_sec if combination in rows else None
        speed = own or max((row.samples_per_sec or 0.0 for row in rows.values()), default=0.0)
        return round(min(max(seconds * speed / combination.batch_size, FEWEST_BATCHES), MOST_BATCHES))

    def works(self, combination: Combination) -> bool:
        """Returns whether it was measured, with a finite loss, within the usable memory, without a leak."""
        return not self.why_not(combination)

    def ratio(self, a: Combination, b: Combination) -> float:
        rows = self.rows
        found = compare_speeds(rows[a], rows[b], self.model).ratio
        return found if math.isfinite(found) else (rows[a].samples_per_sec or 0.0) / (rows[b].samples_per_sec or 1.0)

    def ranked(self) -> list[Combination]:
        """Returns those that work, the fastest first."""
        return sorted(filter(self.works, self.rows), key=lambda c: -self.model.effect(self.rows[c]))

    def expected_to_fit(self, combination: Combination) -> bool:
        return self.expected_bytes(combination) <= self.limits.usable_bytes

    def expected_bytes(self, combination: Combination) -> float:
        """Expects memory on the line through the two largest parts measured with this precision and remat.

        With a single point the line goes through zero: what does not grow with the batch then counts as if it did, so
        the expectation is not too low. A trial that ran out of memory is a point at the limit. Without a point the
        expectation is 0: only a trial can tell.
        """
        points: dict[float, float] = {}
        for other, row in self.rows.items():
            memory = self.limits.memory_bytes if row.status == OUT_OF_MEMORY else row.memory_bytes
            alike = (other.precision, other.remat) == (combination.precision, combination.remat)
            if alike and row.status in (OK, OUT_OF_MEMORY) and memory and math.isfinite(memory):
                points[other.part_size] = max(memory, points.get(other.part_size, 0.0))
        if not points:
            return 0.0
        x, memory = max(points.items())
        smaller = max((point for point in points.items() if point[0] < x), default=(0.0, 0.0))
        slope = max(0.0, (memory - smaller[1]) / (x - smaller[0]))
        return memory + slope * (combination.part_size - x)

    def why_not(self, combination: Combination) -> str:
        """Returns why a combination does not work; empty if it does."""
        row = self.rows.get(combination)
        return "not measured" if row is None else self.what_is_wrong(row)

    def what_is_wrong(self, row: SweepRow) -> str:
        """Returns what keeps settings from being used; empty if nothing does."""
        if row.status != OK:
            return row.reason or row.status
        if not row.finite:
            return "its loss is not finite"
        if row.leak:
            return "its memory grows from step to step"
        fits = math.isinf(row.memory_bytes) or row.memory_bytes <= self.limits.usable_bytes
        return "" if fits else "it takes more memory than is allowed"

    def fails(self, combination: Combination) -> bool:
        """Returns whether it was seen not to work; one that ran out of time was not."""
        row = self.rows.get(combination)
        return row is not None and row.status != SKIPPED and not self.works(combination)

    def waits_for_data(self, combination: Combination) -> bool:
        """Returns whether the loader limits its speed."""
        return (self.rows[combination].mean("data_wait_fraction") or 0.0) > WAITING


def program_of(combination: Combination) -> Combination:
    """Returns what decides which program is compiled."""
    return dataclasses.replace(combination, num_workers=0, pipeline="", prefetch=0, worker_threads=1)
