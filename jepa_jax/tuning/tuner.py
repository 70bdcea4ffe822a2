"""Searches for the fastest settings of a machine: tens of trials where the whole grid has hundreds.

1. The config as given is measured: the reference of every gain.
2. The batch doubles while that pays and fits the memory, then is bisected; where doubling does not pay, it halves.
3. Workers, pipeline, precision, remat and the neighbouring batches challenge the leader, each alone, then those that
   gained together. One short trial for all, more and longer ones for the better half, interleaved; again around a new
   leader, until nothing is left to try.
4. The leader, those close to it and the reference are measured side by side: the choice and its gain. Without a gain
   the config stays as it is.
5. The choice is confirmed by a longer run with a validation pass and a checkpoint; one that fails gives way to less.

The machine is a function (`Run`), so that the search can be tried on machines that are formulas.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jepa_jax.tuning import choice
from jepa_jax.tuning.noise import SAME, compare, fit, speeds
from jepa_jax.tuning.trial import OK, OUT_OF_MEMORY, REFUSED, Combination, combination_of
from jepa_jax.tuning.tuner_space import Space
from jepa_jax.tuning.tuner_trials import SHORT_SECONDS, Limits, Run, Trials, changes, part_of

GROWTH = 1.03  # a larger (or smaller) batch must be this much faster for the next step in its direction
HOPELESS = 0.90  # of the leader's speed in one short trial: that value is not looked at again
ALIVE = 0.93  # of the fastest's speed in one short trial: gets a second one
CLOSE = 0.95  # of the leader's speed: measured beside it in the end
WORTH = 1.03  # what a single change must gain to be combined with others
NEWS = 1.01  # what a new leader must gain for another race around it
CLEAR = 1.10  # a gain after which a race is over: others are compared with the new leader
KEEP = 1.02  # a choice that gains less than this, and within noise, gives way to the config as given
RUNGS = 2  # of a race: everyone, then the better half; the finals are the third
FINALISTS, FINAL_REPEATS = 3, 3
BISECTIONS, BACK_OFFS = 3, 4
CONFIRM_SECONDS = 10.0  # of measured steps


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What the search found; `chosen` is None if nothing could be measured."""

    chosen: Combination | None
    confirmed: bool
    finalists: tuple[Combination, ...]
    untried: tuple[Combination, ...]  # for lack of time
    notes: tuple[str, ...]


class Search(Trials):
    """One search over a space."""

    def __init__(self, config: Mapping[str, Any], space: Space, limits: Limits, run: Run, **options: Any):
        """`options`: those of `Trials`."""
        super().__init__(config, limits, run, **options)
        self.space = space
        self.reference = space.start(combination_of(config))
        self.notes: list[str] = []
        self._hopeless: set[tuple[str, Any]] = set()

    def search(self) -> Outcome:
        """All five steps, as far as the time allows."""
        self.measure(self.reference)
        self.reserved_trials = 7
        self.stage = "batch"
        self._find_batch()
        self.stage = "settings"
        self._challenge()
        leader = self.ranked()[:1]
        if not leader:
            self.notes.append("No combination could be measured.")
            return self._outcome(None, False, [])
        self.stage = "finalists"
        self.reserved_trials = 3
        finalists = self._finals()
        self.stage, self.reserved_trials = "confirmation", 0
        chosen, confirmed = self._confirm(self._choose(finalists))
        return self._outcome(chosen, confirmed, finalists)

    def _outcome(self, chosen: Combination | None, confirmed: bool, finalists: Sequence[Combination]) -> Outcome:
        rows = self.rows()
        untried = tuple(dict.fromkeys(c for c in self.untried if c not in rows))
        return Outcome(chosen, confirmed, tuple(finalists), untried, tuple(self.notes))

    def _find_batch(self) -> None:
        start = self.reference
        for _ in range(BACK_OFFS):
            smaller = self.space.smaller(start)
            if self.works(start) or smaller is None:
                break
            self.notes.append(f"{start.label} does not work here: {self.why_not(start)}.")
            start = smaller
            self.measure(start)
        if not self.works(start):
            return
        if not self._waits(start):
            self._explore_batches(start)

    def _explore_batches(self, start: Combination) -> None:
        if self._climb(start, self._larger) == start:
            self._climb(start, self.space.smaller)

    def _climb(self, start: Combination, step: Callable[[Combination], Combination | None]) -> Combination:
        """Goes on in one direction while each step pays."""
        best = start
        while (following := step(best)) is not None and (following in self.rows() or self.measure(following)):
            if not self.works(following):
                if self.rows()[following]["status"] != REFUSED:
                    best = self._bisect(best, following)
                break
            if self.ratio(following, best) < GROWTH:
                break
            best = following
        return best

    def _bisect(self, works: Combination, fails: Combination) -> Combination:
        for _ in range(BISECTIONS):
            middle = self.space.between(works, fails)
            if middle is None or not self.measure(middle):
                break
            works, fails = (middle, fails) if self.works(middle) else (works, middle)
        return works

    def _larger(self, combination: Combination) -> Combination | None:
        """The next batch up, or less where that would not fit."""
        larger = self.space.larger(combination)
        if larger is None or self.expected_to_fit(larger):
            return larger
        return self.space.largest_below(combination, larger, self.expected_to_fit)

    def _challenge(self) -> None:
        """Races around the leader until no new challenger is left."""
        while ranked := self.ranked():
            leader = self._roomiest(ranked)
            new = self._challengers(leader)
            known = [c for c in ranked if c != leader and self.ratio(c, leader) > CLOSE]
            if not new or not self._race(leader, [leader, *new, *known[:1]]):
                break
            winner = self._roomiest(self.ranked())
            if winner != leader:
                if self.ratio(winner, leader) < NEWS:
                    break
                if winner.batch_size != leader.batch_size:
                    self._explore_batches(winner)

    def _challengers(self, leader: Combination) -> list[Combination]:
        """Changes of one setting that were not tried, nor hopeless elsewhere; with a smaller batch where it must be.

        While the leader waits for data, what makes the step itself faster would not show: the loader comes first.
        """
        rows = self.rows()
        hopeful = [c for c in self.space.neighbours(leader) if not self._hopeless & set(changes(leader, c))]
        batches = [self._larger(leader), self.space.smaller(leader)]
        new = [c for c in dict.fromkeys([*map(self._shrunk, hopeful), *batches]) if c is not None and c not in rows]
        loader = [c for c in new if {name for name, _ in changes(leader, c)} <= {"num_workers", "pipeline"}]
        return loader if loader and self._waits(leader) else new

    def _roomiest(self, ranked: Sequence[Combination]) -> Combination:
        """The leader; of loaders that are as fast, the one that would also feed a faster step."""
        alike = [
            c for c in ranked
            if {name for name, _ in changes(c, ranked[0])} <= {"num_workers", "pipeline"}
            and self.ratio(c, ranked[0]) > 1 / WORTH
        ]  # fmt: skip
        return max(alike, key=lambda c: (c.pipeline == "device", c.num_workers))

    def _shrunk(self, combination: Combination) -> Combination | None:
        """With the largest batch of the ladder that is expected to fit."""
        while not self.expected_to_fit(combination):
            smaller = self.space.smaller(combination)
            if smaller is None:
                return None
            combination = smaller
        return combination

    def _waits(self, combination: Combination) -> bool:
        return (
            self.rows()[combination].get("data_wait_fraction") or 0.0
        ) > choice.WAITING  # then the loader comes first

    def _race(self, leader: Combination, pool: list[Combination]) -> bool:
        """Halves the pool with every rung; False if the time was up."""
        in_time = True
        for rung in range(RUNGS):
            self.round += 1
            order = pool[rung % len(pool) :] + pool[: rung % len(pool)]
            in_time = all([self.measure(c, SHORT_SECONDS * (1 + rung / 2)) for c in order])
            alive = self.ranked(pool)
            if not alive:
                break
            keep = [c for c in alive if self.ratio(c, alive[0]) > ALIVE][: math.ceil(len(pool) / 2)]
            if rung == 0 and self.works(leader):
                self._hopeless |= self._hopeless_changes(leader, pool)
                keep = (keep[:1] if self.ratio(alive[0], leader) > CLEAR else keep) + self._merged(leader, WORTH)
            pool = keep
            if len(pool) < 2 or not in_time:
                break
        # After repeats small gains count too, if there are several of them.
        return in_time and all([self.measure(c) for c in self._merged(leader, NEWS)])

    def _hopeless_changes(self, leader: Combination, pool: Sequence[Combination]) -> set[tuple[str, Any]]:
        """Single changes that failed or made the leader clearly slower; a batch may be right for other settings."""
        found, rows = set(), self.rows()
        for combination in pool:
            change = changes(leader, combination)
            if len(change) != 1 or change[0][0] == "batch_size" or combination not in rows:
                continue
            if rows[combination]["status"] == OUT_OF_MEMORY:
                continue  # it may fit with a smaller batch
            if not self.works(combination) or self.ratio(combination, leader) < HOPELESS:
                found.add(change[0])
        return found

    def _merged(self, leader: Combination, worth: float) -> list[Combination]:
        """All single changes that gained so much, together."""
        gains: dict[str, Any] = {}
        for combination in self.ranked() if self.works(leader) else ():  # the fastest first
            change, *others = changes(leader, combination) or [("", None)]
            if change[0] and not others and self.ratio(combination, leader) > worth:
                gains.setdefault(*change)
        merged = self.space.plain(dataclasses.replace(leader, **gains))
        fresh = len(gains) > 1 and merged not in self.rows() and self.expected_to_fit(merged)
        return [merged] if fresh else []

    def _finals(self) -> list[Combination]:
        """The leader, those close to it and the reference, side by side until each has its repeats."""
        ranked = self.ranked()
        finalists = [c for c in ranked if self.ratio(c, ranked[0]) > self._close()][:FINALISTS]
        # The leader and the reference first: if the time is short, the gain is what matters.
        pool = [c for c in dict.fromkeys([ranked[0], self.reference, *finalists]) if self.works(c)]
        for turn in range(FINAL_REPEATS):
            wanting = [c for c in pool if len(speeds(self.rows()[c])) < FINAL_REPEATS]
            if not wanting:
                break
            self.round += 1
            # All of them, also those with enough: a ratio needs both in one round.
            for combination in pool if turn % 2 == 0 else [*reversed(pool[:2]), *pool[2:]]:
                self.measure(combination, 1.5 * SHORT_SECONDS)
        return finalists

    def _close(self) -> float:
        """A share of the leader's speed that one or two trials may show of an equal."""
        noise = self._read()[1].noise_percent or 0.0
        return min(CLOSE, 1 - 2 * noise / 100)

    def _choose(self, finalists: Sequence[Combination]) -> Combination:
        rows = self.rows()
        candidates = [rows[c] for c in finalists if self.works(c)] or [rows[c] for c in self.ranked()[:1]]
        model = fit(list(rows.values()))
        best, _, _ = choice.choose(candidates, model, most_loss=KEEP - 1)
        if self.works(self.reference):
            gain = compare(best, rows[self.reference], model)
            if gain.verdict == SAME and gain.ratio < KEEP:
                return self.reference  # a change that gains nothing is no reason to change what is learned
        return Combination.from_dict(best["combination"])

    def _confirm(self, chosen: Combination) -> tuple[Combination | None, bool]:
        """A longer run with all that training does; a failure gives way to the next smaller one that works."""
        self.round += 1
        candidate: Combination | None = chosen
        for _ in range(BACK_OFFS):
            if candidate is None:
                break
            if not self.measure(candidate, CONFIRM_SECONDS, confirming=True):
                self.notes.append("There was no time left to confirm the choice by a longer run.")
                return self._measured_up_to(candidate), False
            result = self.trials[-1]["result"]
            if result["status"] == OK and not self.what_is_wrong(result):
                self._repeat(candidate)
                return candidate, True
            reason = result.get("reason") or self.what_is_wrong(result)
            self.notes.append(f"{candidate.label} failed the longer run with validation and checkpoint: {reason}.")
            candidate = self.space.slightly_smaller(candidate)
        self.notes.append("No choice passed the longer run.")
        return (self.reference if self.works(self.reference) else None), False

    def _measured_up_to(self, combination: Combination) -> Combination | None:
        """Itself if it was measured, else the fastest that was, with no larger part of a batch."""
        known = [c for c in self.ranked() if part_of(c) <= part_of(combination)]
        return combination if combination in known else next(iter(known), None)

    def _repeat(self, chosen: Combination) -> None:
        """A choice that had to give way to a smaller one was measured once: an interval needs more."""
        while len(speeds(self.rows()[chosen])) < FINAL_REPEATS:
            self.round += 1
            pool = [c for c in dict.fromkeys([chosen, self.reference]) if c == chosen or self.works(c)]
            if not all([self.measure(combination) for combination in pool]):
                break
