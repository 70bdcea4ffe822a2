"""Searches for the fastest settings of a machine with tens of trials, where the whole grid has hundreds.

1. Measure the config as given: every gain refers to it.
2. Double the batch while that is faster and fits in memory, then bisect; if doubling is not faster, halve it.
3. Compare the leader with every change of one setting (workers, pipeline, precision, remat, next batch) in one short
   trial each, then with the combination of those that gained. Repeat around a new leader until nothing is left to try.
4. Measure the leader, those close to it and the config side by side, and choose. Without a significant gain the config
   is kept.
5. Confirm the choice by a longer run with a validation pass and a checkpoint; if it fails, the next smaller batch is
   tried.

The machine is a function (`RunTrial`), so that tests can search on machines that are formulas.
"""

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jepa_jax.base.statistics import SpeedModel, compare_speeds, fit_speeds
from jepa_jax.experiments.recommendation import WAITING, SettingsChoice, choose_settings
from jepa_jax.experiments.rows import (
    OK,
    OUT_OF_MEMORY,
    REFUSED,
    SKIPPED,
    TIMED_OUT,
    SweepRow,
    TrialResult,
    known_fields,
)
from jepa_jax.experiments.search_space import SearchSpace, changes
from jepa_jax.experiments.settings import Combination, TrialRequest

RunTrial = Callable[[TrialRequest, float], TrialResult]  # runs a trial within a limit of seconds

SHORT_SECONDS = 4.0  # of measured steps
FEWEST_BATCHES, MOST_BATCHES, WARMUP_BATCHES = 8, 96, 3
SMALLEST_LIMIT = 20.0  # seconds that any trial gets
PATIENCE = 5.0  # times the usual length of a trial, after which it counts as hanging
MOST_RESERVE = 0.4  # of the budget, kept for later
GROWTH = 1.03  # a larger (or smaller) batch must be this much faster for the next one to be tried
HOPELESS = 0.90  # of the leader's speed in one short trial: that value is not tried again
CLOSE = 0.95  # of the leader's speed: measured beside it in the end
ALIKE = 1.03  # loaders whose speeds differ by a smaller factor count as equally fast
GAIN = 1.01  # what a change must gain to be combined with others, and a new leader for its neighbours to be tried
FINALISTS, FINAL_REPEATS = 3, 3
BISECTIONS, BACK_OFFS = 3, 4
CONFIRM_SECONDS = 10.0  # of measured steps


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


class Search:
    """One search over a space: runs trials while there is time, and keeps them in order as the rows of a sweep.

    Attributes:
      chosen: the settings to use; None if nothing could be measured.
      confirmed: whether a longer run has confirmed them.
      notes: remarks for the user, a sentence each.
    """

    def __init__(
        self,
        given: TrialRequest,
        space: SearchSpace,
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
        self.given, self.space, self.limits = given, space, limits
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
        self.reference = space.start(given.combination).without_idle_workers()
        self.chosen: Combination | None = None
        self.confirmed = False
        self.notes: list[str] = []
        self.choice: SettingsChoice | None = None  # of the finalists, before the longer run
        self._skipped: list[Combination] = []  # for lack of time
        self._hopeless: set[tuple[str, Any]] = set()

    def search(self) -> None:
        """Runs all five steps, as far as the time allows."""
        self.measure(self.reference)
        self.reserved_trials = 7
        self._find_batch()
        self._challenge()
        if not self.ranked():
            late = [f"{trial.combination.label}: {trial.result.reason}" for trial in self.out_of_time[-1:]]
            self.notes += [f"{text}. --resume with a larger --budget tries it again." for text in late]
            self.notes += ["No combination could be measured."]
            return
        self.reserved_trials = 3
        finalists = self._finals()
        self.reserved_trials = 0
        if chosen := self._choose(finalists):
            self.chosen, self.confirmed = self._confirm(chosen)

    def take_best_so_far(self) -> None:
        """Ends a search that was interrupted."""
        self.notes.append(
            "Interrupted: this is the best so far, not confirmed; tuned.json was not written, --resume continues."
        )
        self.chosen = self._choose(self.ranked())

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

    def _find_batch(self) -> None:
        start = self.reference
        for _ in range(BACK_OFFS):
            smaller = self.space.smaller(start)
            if self.works(start) or smaller is None or not self._fails(start):
                break
            self.notes.append(f"{start.label} does not work here: {self.why_not(start)}.")
            start = smaller
            self.measure(start)
        if self.works(start) and not self._waits(start):
            self._explore_batches(start)

    def _explore_batches(self, start: Combination) -> None:
        if self._climb(start, self._larger) == start:
            self._climb(start, self.space.smaller)

    def _climb(self, start: Combination, step: Callable[[Combination], Combination | None]) -> Combination:
        """Continues in one direction while each step pays."""
        best = start
        while (following := step(best)) is not None and (following in self.rows or self.measure(following)):
            if not self.works(following):
                if self._fails(following) and self.rows[following].status != REFUSED:
                    best = self._bisect(best, following)
                break
            if self.ratio(following, best) < GROWTH:
                break
            best = following
        return best

    def _bisect(self, works: Combination, fails: Combination) -> Combination:
        for _ in range(BISECTIONS):
            middle = self.space.between(works, fails)
            if middle is None or not self.measure(middle) or not (self.works(middle) or self._fails(middle)):
                break
            works, fails = (middle, fails) if self.works(middle) else (works, middle)
        return works

    def _fails(self, combination: Combination) -> bool:
        """Returns whether it was seen not to work; one that ran out of time was not."""
        row = self.rows.get(combination)
        return row is not None and row.status != SKIPPED and not self.works(combination)

    def _larger(self, combination: Combination) -> Combination | None:
        """Returns the next larger batch; one less far where that is not expected to fit."""
        larger = self.space.larger(combination)
        while larger is not None and not self.expected_to_fit(larger):
            larger = self.space.between(combination, larger)
        return larger

    def _challenge(self) -> None:
        """Compares the leader with its neighbours, and each new leader with its own, until none is left."""
        while ranked := self.ranked():
            leader = self._roomiest(ranked)
            new = self._challengers(leader)
            self.round += 1
            if not new or not all([self.measure(c) for c in [leader, *new]]):
                break
            self._hopeless |= self._hopeless_changes(leader, new)
            if not all([self.measure(c) for c in self._merged(leader)]):
                break
            winner = self._roomiest(self.ranked())
            if winner != leader and self.ratio(winner, leader) < GAIN:
                break
            if winner.batch_size != leader.batch_size:
                self._explore_batches(winner)

    def _challengers(self, leader: Combination) -> list[Combination]:
        """Returns untried changes of one setting that were not hopeless elsewhere, with a batch that fits.

        While the leader waits for data, a faster step would not show: the loader comes first, with as many workers as
        the wait says that it needs. While it does not, more batches ahead would not show.
        """
        rows, waits = self.rows, self._waits(leader)
        near = [*self._wider(leader), *self.space.neighbours(leader)]
        near = [c for c in near if waits or c.prefetch == leader.prefetch or c.pipeline != leader.pipeline]
        hopeful = [c for c in near if not self._hopeless & set(changes(leader, c))]
        batches = [self._larger(leader), self.space.smaller(leader)]
        new = [c for c in dict.fromkeys([*map(self._shrunk, hopeful), *batches]) if c is not None and c not in rows]
        loader = [c for c in new if _changes_loader_alone(leader, c)]
        return loader if loader and waits else new

    def _wider(self, leader: Combination) -> list[Combination]:
        """Returns the leader with as many workers as would keep the device busy, by the wait that was measured."""
        wait = self.rows[leader].mean("data_wait_fraction") or 0.0
        needed = math.ceil(max(1, leader.num_workers) / max(1 - wait, 1e-3))
        is_wider = self._waits(leader) and leader.num_workers < needed <= self.space.most_workers
        return [dataclasses.replace(leader, num_workers=needed)] if is_wider else []

    def _roomiest(self, ranked: Sequence[Combination]) -> Combination:
        """Returns the leader; of loaders that are as fast, the one that would also feed a faster step."""
        leader = ranked[0]
        alike = [c for c in ranked if _changes_loader_alone(c, leader) and self.ratio(c, leader) > 1 / ALIKE]
        return max(alike, key=lambda c: (c.pipeline == "device", c.num_workers))

    def _shrunk(self, combination: Combination) -> Combination | None:
        """Returns the combination with the largest batch of the ladder that is expected to fit."""
        while not self.expected_to_fit(combination):
            smaller = self.space.smaller(combination)
            if smaller is None:
                return None
            combination = smaller
        return combination

    def _waits(self, combination: Combination) -> bool:
        """Returns whether the loader limits its speed."""
        return (self.rows[combination].mean("data_wait_fraction") or 0.0) > WAITING

    def _hopeless_changes(self, leader: Combination, pool: Sequence[Combination]) -> set[tuple[str, Any]]:
        """Returns single changes that failed or made the leader clearly slower, except those of the batch."""
        found, rows = set(), self.rows
        for combination in pool:
            change = changes(leader, combination)
            if len(change) != 1 or change[0][0] == "batch_size" or combination not in rows:
                continue
            if rows[combination].status == OUT_OF_MEMORY:
                continue  # it may fit with a smaller batch
            if not self.works(combination) or self.ratio(combination, leader) < HOPELESS:
                found.add(change[0])
        return found

    def _merged(self, leader: Combination) -> list[Combination]:
        """Returns the leader with all single changes that gained so much, if that is new and expected to fit."""
        gains: dict[str, Any] = {}
        for combination in self.ranked() if self.works(leader) else ():  # the fastest first
            change, *others = changes(leader, combination) or [("", None)]
            if change[0] and not others and self.ratio(combination, leader) > GAIN:
                gains.setdefault(*change)
        merged = dataclasses.replace(leader, **gains).without_idle_workers()
        is_new = len(gains) > 1 and merged not in self.rows and self.expected_to_fit(merged)
        return [merged] if is_new else []

    def _finals(self) -> list[Combination]:
        """Measures the leader, those close to it and the reference side by side until each has its repeats."""
        ranked = self.ranked()
        # One or two trials may show an equal as slower by twice the noise.
        close = min(CLOSE, 1 - 2 * (self.model.noise_percent or 0.0) / 100)
        finalists = [c for c in ranked if self.ratio(c, ranked[0]) > close][:FINALISTS]
        # The leader and the reference first: if the time is short, the gain is what matters.
        pool = [c for c in dict.fromkeys([ranked[0], self.reference, *finalists]) if self.works(c)]
        for turn in range(FINAL_REPEATS):
            self.round += 1
            for combination in pool if turn % 2 == 0 else [*reversed(pool[:2]), *pool[2:]]:
                self.measure(combination, 1.5 * SHORT_SECONDS)
        return finalists

    def _choose(self, finalists: Sequence[Combination]) -> Combination | None:
        """Chooses among finalists and the reference by the rule of a sweep; None if nothing works.

        Any of the settings that work could have been a finalist, so all of them count as comparisons.
        """
        rows = self.rows
        works = [rows[c] for c in self.ranked()]
        given = rows[self.reference] if self.works(self.reference) else None
        finals = [rows[c] for c in finalists if self.works(c)] or works[:1]
        known = [row.combination for row in finals]
        candidates = finals if given is None or self.reference in known else [*finals, given]
        if not candidates:
            return None
        self.choice = choose_settings(candidates, self.model, given, comparisons=len(works) - 1)
        return self.choice.best.combination

    def _confirm(self, chosen: Combination) -> tuple[Combination | None, bool]:
        """Makes a longer run with all that training does; if it fails, the next smaller batch is tried."""
        self.round += 1
        candidate: Combination | None = chosen
        for _ in range(BACK_OFFS):
            if candidate is None:
                break
            if not self.measure(candidate, CONFIRM_SECONDS, confirming=True):
                self.notes.append("There was no time left to confirm the choice by a longer run.")
                return self._choose([candidate]), False
            problem = self.what_is_wrong(SweepRow(candidate).with_repeat(self.trials[-1].result))
            if not problem:
                again = candidate if candidate == chosen else self._choose([candidate])
                return (candidate, True) if again in (candidate, None) else self._confirm(self.reference)
            self.notes.append(f"{candidate.label} failed the longer run with validation and checkpoint: {problem}.")
            smaller = self.space.smaller(candidate)
            candidate = self.space.between(smaller, candidate) or smaller if smaller else None
        self.notes.append("No choice passed the longer run.")
        return (self._choose([self.reference]) if self.works(self.reference) else None), False


def program_of(combination: Combination) -> Combination:
    """Returns what decides which program is compiled."""
    return dataclasses.replace(combination, num_workers=0, pipeline="", prefetch=0)


def _changes_loader_alone(a: Combination, b: Combination) -> bool:
    return {name for name, _ in changes(a, b)} <= {"num_workers", "pipeline", "prefetch"}
