"""Searches for the fastest settings of a machine with tens of trials, where the whole grid has hundreds.

1. Measure the config as given: every gain refers to it.
2. Double the batch while that is faster and fits in memory, then bisect; if doubling is not faster, halve it.
3. Compare the leader with every change of one setting (workers, pipeline, precision, remat, next batch) in one short
   trial each, then with the combination of those that gained. Repeat around a new leader until nothing is left to try.
4. Measure the leader, those close to it and the config side by side, and choose. Without a significant gain the config
   is kept.
5. Confirm the choice by a longer run with a validation pass and a checkpoint; if it fails, the next smaller batch is
   tried.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from jepa_jax.experiments.recommendation import SettingsChoice, choose_settings
from jepa_jax.experiments.rows import OUT_OF_MEMORY, REFUSED, SweepRow
from jepa_jax.experiments.search_space import SearchSpace, changes
from jepa_jax.experiments.search_trials import SHORT_SECONDS, RunTrial, SearchLimits, Trials
from jepa_jax.experiments.settings import LOADER_KNOBS, Combination, TrialRequest

GROWTH = 1.03  # a larger (or smaller) batch must be this much faster for the next one to be tried
HOPELESS = 0.90  # of the leader's speed in one short trial: that value is not tried again
CLOSE = 0.95  # of the leader's speed: measured beside it in the end
ALIKE = 1.03  # loaders whose speeds differ by a smaller factor count as equally fast
GAIN = 1.01  # what a change must gain to be combined with others, and a new leader for its neighbours to be tried
FINALISTS, FINAL_REPEATS = 3, 3
BISECTIONS, BACK_OFFS = 3, 4
CONFIRM_SECONDS = 10.0  # of measured steps


class Search(Trials):
    """One search over a space.

    Attributes:
      chosen: the settings to use; None if nothing could be measured.
      confirmed: whether a longer run has confirmed them.
      notes: remarks for the user, a sentence each.
    """

    def __init__(self, given: TrialRequest, space: SearchSpace, limits: SearchLimits, run: RunTrial, **options: Any):
        """Takes what `Trials` does, and where to search."""
        super().__init__(given, limits, run, **options)
        self.space = space
        self.reference = space.start(given.combination).without_idle_workers()
        self.chosen: Combination | None = None
        self.confirmed = False
        self.notes: list[str] = []
        self.choice: SettingsChoice | None = None  # of the finalists, before the longer run
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

    def _find_batch(self) -> None:
        start = self.reference
        for _ in range(BACK_OFFS):
            smaller = self.space.smaller(start)
            if self.works(start) or smaller is None or not self.fails(start):
                break
            self.notes.append(f"{start.label} does not work here: {self.why_not(start)}.")
            start = smaller
            self.measure(start)
        if self.works(start) and not self.waits_for_data(start):
            self._explore_batches(start)

    def _explore_batches(self, start: Combination) -> None:
        if self._climb(start, self._larger) == start:
            self._climb(start, self.space.smaller)

    def _climb(self, start: Combination, step: Callable[[Combination], Combination | None]) -> Combination:
        """Continues in one direction while each step pays."""
        best = start
        while (following := step(best)) is not None and (following in self.rows or self.measure(following)):
            if not self.works(following):
                if self.fails(following) and self.rows[following].status != REFUSED:
                    best = self._bisect(best, following)
                break
            if self.ratio(following, best) < GROWTH:
                break
            best = following
        return best

    def _bisect(self, works: Combination, fails: Combination) -> Combination:
        for _ in range(BISECTIONS):
            middle = self.space.between(works, fails)
            if middle is None or not self.measure(middle) or not (self.works(middle) or self.fails(middle)):
                break
            works, fails = (middle, fails) if self.works(middle) else (works, middle)
        return works

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
        the wait says that it needs. While it does not, more batches ahead or at once would not show.
        """
        rows, waits = self.rows, self.waits_for_data(leader)
        near = [*self._wider(leader), *self.space.neighbours(leader)]
        ahead = (leader.prefetch, leader.worker_threads, leader.pipeline)
        near = [c for c in near if waits or (c.prefetch, c.worker_threads) == ahead[:2] or c.pipeline != ahead[2]]
        hopeful = [c for c in near if not self._hopeless & set(changes(leader, c))]
        batches = [self._larger(leader), self.space.smaller(leader)]
        new = [c for c in dict.fromkeys([*map(self._shrunk, hopeful), *batches]) if c is not None and c not in rows]
        loader = [c for c in new if _changes_loader_alone(leader, c)]
        return loader if loader and waits else new

    def _wider(self, leader: Combination) -> list[Combination]:
        """Returns the leader with as many workers, or threads in them, as the measured wait says that it needs."""
        wait = self.rows[leader].mean("data_wait_fraction") or 0.0
        workers, threads = max(1, leader.num_workers), leader.worker_threads
        needed = math.ceil(workers * threads / max(1 - wait, 1e-3))
        if not self.waits_for_data(leader):
            return []
        more, deeper = math.ceil(needed / threads), math.ceil(needed / workers)
        wider: list[dict[str, Any]] = []
        if leader.num_workers < more <= self.space.most_workers:
            wider.append({"num_workers": more})
        if leader.num_workers and threads < deeper <= self.space.most_threads:
            wider.append({"worker_threads": deeper})
        return [dataclasses.replace(leader, **change) for change in wider]

    def _roomiest(self, ranked: Sequence[Combination]) -> Combination:
        """Returns the leader; of loaders that are as fast, the one that would also feed a faster step."""
        leader = ranked[0]
        alike = [c for c in ranked if _changes_loader_alone(c, leader) and self.ratio(c, leader) > 1 / ALIKE]
        return max(alike, key=lambda c: (c.pipeline == "device", c.num_workers * c.worker_threads))

    def _shrunk(self, combination: Combination) -> Combination | None:
        """Returns the combination with the largest batch of the ladder that is expected to fit."""
        while not self.expected_to_fit(combination):
            smaller = self.space.smaller(combination)
            if smaller is None:
                return None
            combination = smaller
        return combination

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


def _changes_loader_alone(a: Combination, b: Combination) -> bool:
    return {name for name, _ in changes(a, b)} <= {"pipeline", *LOADER_KNOBS}
