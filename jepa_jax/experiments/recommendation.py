"""Which combination to use, from the rows of a sweep or a search, and the reasons in words.

`data.batch_size` counts the images of one optimizer step, also with accumulation, which computes it in parts: the
effective batch is the batch size.
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

from jepa_jax.base.statistics import (
    FASTER,
    SAME,
    SpeedModel,
    SpeedRatio,
    bonferroni_level,
    compare_speeds,
    fit_speeds,
)
from jepa_jax.config.groups import Config
from jepa_jax.experiments.advice import batch_sentences, learning_rate_advice, resolution_sentence, what_limits
from jepa_jax.experiments.knob_effects import knob_effects
from jepa_jax.experiments.rows import OK, PENDING, SKIPPED, SweepRow
from jepa_jax.experiments.settings import Combination
from jepa_jax.runtime.provenance import num_cores

EQUAL_MEMORY = 1.02  # within this factor two peaks count as equal, and the number of workers decides
MOST_LOSS = 0.01  # of the fastest reading's speed, that a choice with less memory or fewer workers may give away

# What is shown about the config as given.
SHOWN, KEEP = "faster than the config", "nothing shown: keep the config"
AS_GIVEN, NO_CONFIG = "the config is the fastest", "the config cannot be kept"


@dataclasses.dataclass(frozen=True)
class Choice:
    """What to use: the leader if it is shown to be faster than the config as given, otherwise that config.

    Attributes:
      best: the row to use.
      leader: the fastest, or the lightest of those that are as fast within noise and MOST_LOSS.
      fastest: the fastest reading.
      tied: rows other than the leader that are as fast within noise and MOST_LOSS.
      gain: speed of the leader over the config; None if it is the config, or the config was not measured.
      verdict: SHOWN | KEEP | AS_GIVEN | NO_CONFIG.
    """

    best: SweepRow
    leader: SweepRow
    fastest: SweepRow
    tied: tuple[SweepRow, ...]
    gain: SpeedRatio | None
    verdict: str


@dataclasses.dataclass(frozen=True)
class Recommendation:
    """The combination to use (None if there is none), what is known of it, and the reasons in sentences.

    Attributes:
      verdict: what is shown about the config as given; None if there is nothing to recommend.
      gain: speed over the config as given; None if that was not measured, or is the recommended one.
      not_shown: the leader and its gain, where the interval contains 1 and the config is kept.
      tied: other combinations that are as fast within noise.
      knobs: effect of each swept knob.
    """

    text: tuple[str, ...]
    knobs: tuple[dict[str, Any], ...]
    noise_percent: float | None
    best: Combination | None = None
    samples_per_sec: float | None = None
    samples_per_sec_ci95: tuple[float, float] | None = None
    verdict: str | None = None
    gain: SpeedRatio | None = None
    not_shown: tuple[Combination, SpeedRatio] | None = None
    tied: tuple[Combination, ...] = ()
    learning_rate_advice: dict[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Returns the conclusion of the JSON file."""
        interval, leader = self.samples_per_sec_ci95, self.not_shown
        return {
            "best": self.best.to_dict() if self.best else None,
            "samples_per_sec": self.samples_per_sec,
            "samples_per_sec_ci95": list(interval) if interval else None,
            "verdict": self.verdict,
            "gain": self.gain.to_dict() if self.gain else None,
            "not_shown": {"combination": leader[0].to_dict(), **leader[1].to_dict()} if leader else None,
            "tied": [combination.to_dict() for combination in self.tied],
            "text": list(self.text),
            "knobs": list(self.knobs),
            "noise_percent": self.noise_percent,
            "learning_rate_advice": self.learning_rate_advice,
        }


def recommend(rows: Sequence[SweepRow], *, config: Config, fixed_batch: int | None = None) -> Recommendation:
    """Recommends what `choose` chooses; a row that leaks only if all do, one whose loss is not finite never.

    Args:
      config: the config as given, to which the gain refers.
      fixed_batch: considers rows of this batch size alone.
    """
    model = fit_speeds(rows)
    measured = [row for row in rows if row.is_measured]
    candidates, remarks = sound_rows(measured, fixed_batch)
    failures = collections.Counter(row.status for row in rows if row.status not in (OK, PENDING, SKIPPED))
    if failures:
        parts = ", ".join(f"{count} {status.replace('_', ' ')}" for status, count in failures.most_common())
        remarks.insert(0, f"{failures.total()} of {len(rows)} combinations failed: {parts}.")
    knobs = tuple(knob_effects(rows, model))
    if not candidates:
        text = [f"Nothing to recommend: {why_none(measured, fixed_batch)}", *remarks]
        return Recommendation(tuple(text), knobs, model.noise_percent)
    given = Combination.of(config).without_idle_workers()
    choice = choose(candidates, model, next((row for row in measured if row.combination == given), None))
    best = choice.best
    text = [
        *choice_sentences(choice),
        *tie_sentences(choice),
        resolution_sentence(model, len(best.speeds), len(candidates)),
        what_limits(best, cores=num_cores()),
        *remarks,
        *(knob["text"] for knob in knobs),
        *batch_sentences(config, best.combination),
    ]
    return Recommendation(
        text=tuple(text), knobs=knobs, noise_percent=model.noise_percent, **chosen_fields(choice, config)
    )


def chosen_fields(choice: Choice, config: Config) -> dict[str, Any]:
    """Returns the fields of a Recommendation that follow from a choice."""
    best, gain = choice.best, choice.gain
    return {
        "best": best.combination,
        "samples_per_sec": best.samples_per_sec,
        "samples_per_sec_ci95": best.samples_per_sec_ci95,
        "verdict": choice.verdict,
        "gain": gain if choice.verdict != KEEP else None,
        "not_shown": (choice.leader.combination, gain) if choice.verdict == KEEP and gain else None,
        "tied": tuple(row.combination for row in choice.tied),
        "learning_rate_advice": learning_rate_advice(config, best.combination.batch_size),
    }


def sound_rows(measured: Sequence[SweepRow], fixed_batch: int | None) -> tuple[list[SweepRow], list[str]]:
    """Returns the rows that may be recommended, and sentences about those that may not."""
    remarks = []
    allowed = list(measured)
    if fixed_batch is not None:
        allowed = [row for row in measured if row.combination.batch_size == fixed_batch]
        remarks.append(f"The batch is kept at {fixed_batch:,} images: {len(allowed)} of {len(measured)} have it.")
    finite = [row for row in allowed if row.finite]
    if len(finite) < len(allowed):
        diverging = ", ".join(row.combination.label for row in allowed if not row.finite)
        remarks.append(f"The loss is not finite, so not recommended: {diverging}.")
    steady = [row for row in finite if not row.leak]
    if len(steady) < len(finite):
        leaking = ", ".join(row.combination.label for row in finite if row.leak)
        remarks.append(f"Memory grows from step to step, so not recommended: {leaking}.")
        if not steady:
            remarks.append("All rows leak: a long run with this combination will run out of memory.")
    return steady or finite, remarks


def why_none(measured: Sequence[SweepRow], fixed_batch: int | None) -> str:
    if any(fixed_batch in (None, row.combination.batch_size) for row in measured):
        return "no combination has a finite loss."
    if measured:
        return f"no combination with a batch of {fixed_batch:,} images could be measured."
    return "no combination was measured."


def choose(
    candidates: Sequence[SweepRow], model: SpeedModel, given: SweepRow | None = None, comparisons: int | None = None
) -> Choice:
    """Chooses as a sweep and a search do, see `Choice`.

    The fastest of many readings is partly the luckiest, so intervals hold for all comparisons together (Bonferroni):
    those with the fastest reading, and those with the config, of which any could have been the one that is looked at.

    Args:
      candidates: measured rows that may be used.
      given: row of the config as given, if it was measured; it is kept only if it is a candidate.
      comparisons: rows that might have been compared with the config; by default the other candidates.
    """
    others = len(candidates) - 1
    fastest = max(candidates, key=model.effect)
    ratios = [compare_speeds(row, fastest, model, bonferroni_level(others)) for row in candidates]
    tied = [
        row
        for row, found in zip(candidates, ratios, strict=True)
        if row is fastest or (found.verdict == SAME and found.ratio >= 1 - MOST_LOSS)
    ]
    memory = {row.combination: memory_needed(row, candidates) for row in tied}
    leader = min(tied, key=functools.partial(_preference, memory=memory, model=model))
    gain = None
    if given is not None and given.combination != leader.combination:
        gain = compare_speeds(leader, given, model, bonferroni_level(max(others, comparisons or 1)))
    can_keep = given is not None and any(row.combination == given.combination for row in candidates)
    if not can_keep:
        verdict = NO_CONFIG
    elif gain is None:
        verdict = AS_GIVEN
    else:
        verdict = SHOWN if gain.verdict == FASTER else KEEP
    best = given if verdict == KEEP and given is not None else leader
    return Choice(best, leader, fastest, tuple(row for row in tied if row is not leader), gain, verdict)


def memory_needed(row: SweepRow, candidates: Sequence[SweepRow]) -> float:
    """Returns the smallest reading of all rows that run the same program from the same pipeline: readings vary."""
    return min(other.memory_bytes for other in candidates if other is row or other.same_execution(row))


def _preference(row: SweepRow, memory: dict[Combination, float], model: SpeedModel) -> tuple[bool, float, int, float]:
    """Sorts by memory unless it is close to the least, then by workers, then by speed."""
    needed = memory[row.combination]
    light = needed <= EQUAL_MEMORY * min(memory.values())
    return not light, 0.0 if light else needed, row.combination.num_workers, -model.effect(row)


def rate(row: SweepRow) -> str:
    """Returns the speed of a measured row in words: 1,234 images/s (1,220 to 1,248)."""
    speed, interval = row.samples_per_sec or 0.0, row.samples_per_sec_ci95
    digits = 0 if speed >= 100 else 1
    text = f"{speed:,.{digits}f} images/s"
    return text + (f" ({interval[0]:,.{digits}f} to {interval[1]:,.{digits}f})" if interval else "")


def choice_sentences(
    choice: Choice, given: str = "the config as given", why_not: str = "it was not measured"
) -> list[str]:
    """Returns what to use and what is shown about it, in the words of text and page alike.

    Args:
      given: what the gain refers to.
      why_not: why that cannot be kept, if it cannot.
    """
    best, gain, verdict = choice.best, choice.gain, choice.verdict
    label = best.combination.label
    if verdict == AS_GIVEN:
        return [f"Keep {given} ({label}): {rate(best)}. No other usable combination is faster."]
    if verdict == KEEP:
        why = "the interval contains 1" if gain and math.isfinite(gain.high) else "nothing can be told from noise"
        leader = f"The fastest of the others, {choice.leader.combination.label}, is {gain} its speed: {why}."
        return [f"Nothing shown: keep {given} ({label}): {rate(best)}.", leader]
    use = f"Use {label}: {rate(best)}."
    if verdict == SHOWN:
        return [use, f"That is {gain} the speed of {given}; the interval holds for all comparisons together."]
    compared = f"; this is {gain} its speed" if gain and math.isfinite(gain.ratio) else ""
    return [use, f"{given[0].upper()}{given[1:]} cannot be kept: {why_not}{compared}."]


def tie_sentences(choice: Choice) -> list[str]:
    """Says why the choice is not the fastest reading, or what is as good."""
    best, tied, fastest = choice.best, choice.tied, choice.fastest
    if choice.verdict == KEEP:
        return []
    if best is not fastest:
        return [
            f"The fastest reading was {rate(fastest)} with {fastest.combination.label}: the same within noise and "
            f"{100 * MOST_LOSS:.0f} %, with more memory or more workers."
        ]
    if not tied:
        return []
    others = f"{len(tied)} other combination" + ("s are" if len(tied) > 1 else " is")
    return [
        f"{others} as fast within noise and {100 * MOST_LOSS:.0f} %; this one takes the least memory, "
        "then the fewest workers."
    ]
