"""The search for the largest batch that fits, with few compilations.

Memory is nearly linear in the batch. The first guess assumes that only state and gradients do not grow with the batch;
compiling it gives a second point close to the answer, and the line through both points settles the rest. Where XLA
recomputes to stay within the memory, the line ends: from there the batch grows by a quarter until it no longer fits,
and the gap is halved.
"""

import bisect
import dataclasses
import math
from collections.abc import Sequence

from jepa_jax.planning.estimate import FITS, FITS_BELOW, FRAGMENTATION, WORKSPACE_MOST_BYTES, Estimate

BATCH_GRAIN = 8  # images per device and accumulation step: largest batches are multiples of this
MOST_COMPILATIONS = 3
MOST_RECOMPUTING = 6  # points of a search in which XLA recomputes
GROWTH, CLOSE_BATCHES = 1.25, 1.07  # of a batch with which XLA recomputes; ratio of two batches that settles a search
CLOSE_ENOUGH = 0.025  # of the memory: a batch that leaves less free is the answer
FIRST_GUESS, LATER_GUESS = 0.99, 0.997  # of what the line predicts: a guess that fits is an answer
MOST_GRAINS = 2**20


@dataclasses.dataclass(frozen=True)
class LargestBatch:
    """The largest batch found to fit; 0 if none does.

    `at_set`: limited by the size of the data set, not by memory. `searched`: whether other batches were tried.
    """

    batch_size: int
    estimate: Estimate | None
    at_set: bool = False
    searched: bool = True


class BatchSearch:
    """Searches from one compiled estimate: compile `next_batch`, `add` its estimate, until `result` is not None."""

    def __init__(self, first: Estimate, num_train: int):
        self.points = [first]
        self.result: LargestBatch | None = None
        self._grain = BATCH_GRAIN * first.request.devices * first.request.config.train.accum_steps
        self._most = max(self._grain, num_train // self._grain * self._grain)
        self._advance()

    def add(self, estimate: Estimate) -> None:
        """Adds the estimate of `next_batch`."""
        self.points.append(estimate)
        self._advance()

    def _advance(self) -> None:
        """Determines the next batch to compile, or the result if one more compilation would not change it."""
        guess = next_guess(self.points, self._grain)
        self.next_batch, at_set = min(guess, self._most), guess >= self._most
        best = best_of(self.points)
        if best.estimate is not None and best.estimate.facts.recomputed:
            self._advance_recomputing(best)
            return
        if best.estimate is None:
            smallest = min(point.batch_size for point in self.points)
            settled = self.next_batch >= smallest  # nothing smaller is left to try
        else:
            free = FITS_BELOW - best.estimate.need.total / best.estimate.capacity
            known = any(point.batch_size == self.next_batch for point in self.points)
            close = free < CLOSE_ENOUGH and len(self.points) > 1
            settled = known or self.next_batch <= best.batch_size or close
        if settled or len(self.points) > MOST_COMPILATIONS:
            self.result = dataclasses.replace(best, at_set=at_set and 0 < best.batch_size >= self.next_batch)

    def _advance_recomputing(self, best: LargestBatch) -> None:
        """Looks above a batch that fits because XLA recomputes, where memory no longer follows a line."""
        above = min((p.batch_size for p in self.points if p.batch_size > best.batch_size), default=None)
        guess = best.batch_size * GROWTH if above is None else (best.batch_size + above) / 2
        self.next_batch = min(round(guess / self._grain) * self._grain, self._most)
        known = any(point.batch_size == self.next_batch for point in self.points)
        close = above is not None and above <= CLOSE_BATCHES * best.batch_size
        if known or close or len(self.points) >= MOST_RECOMPUTING:
            self.result = dataclasses.replace(best, at_set=best.batch_size >= self._most)


def best_of(points: Sequence[Estimate]) -> LargestBatch:
    """Returns the largest of the compiled batches that fit."""
    fitting = [point for point in points if point.verdict == FITS]
    best = max(fitting, key=lambda point: point.batch_size, default=None)
    return LargestBatch(best.batch_size if best else 0, best)


def next_guess(points: Sequence[Estimate], grain: int) -> int:
    """Returns the batch, a multiple of `grain`, at which the need should reach the limit."""
    limit = FITS_BELOW * points[-1].capacity
    counts = range(1, MOST_GRAINS + 1)
    most = max(1, bisect.bisect_right(counts, limit, key=lambda count: predicted_need(points, count * grain)))
    # Where grains are large, less than half of one is no reason to give up a whole one.
    spare = most * (1 - (FIRST_GUESS if len(points) == 1 else LATER_GUESS))
    return (most if spare < 0.5 else math.floor(most - spare)) * grain


def predicted_need(points: Sequence[Estimate], batch_size: int) -> float:
    """Returns the need at another batch: the peak on a line, the workspace of convolutions up to its cap."""
    last = points[-1]
    facts, need = last.facts, last.need
    slope = (need.peak - facts.state_bytes - facts.parameter_bytes) / last.batch_size
    for other in points[:-1]:
        if other.batch_size != last.batch_size:
            slope = (need.peak - other.need.peak) / (last.batch_size - other.batch_size)
    peak = need.peak + max(0.0, slope) * (batch_size - last.batch_size)
    workspace = min(facts.largest_convolution_bytes * batch_size / last.batch_size, WORKSPACE_MOST_BYTES)
    return peak * (1 + FRAGMENTATION) + need.data + workspace + need.context + need.collectives
