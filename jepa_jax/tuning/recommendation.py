"""Which combination to use, from the rows of a sweep or a search, and the reasons in words.

`data.batch_size` counts the images of one optimizer step, also with accumulation, which computes it in parts: the
effective batch is the batch size.
"""

import collections
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from jepa_jax.config.groups import Config
from jepa_jax.tuning.advice import batch_sentences, learning_rate_advice, resolution_sentence, what_limits
from jepa_jax.tuning.knob_effects import knob_effects
from jepa_jax.tuning.rows import OK, PENDING, SKIPPED, SweepRow
from jepa_jax.tuning.settings import Combination
from jepa_jax.tuning.speed_statistics import CONFIDENCE, SAME, SpeedModel, SpeedRatio, compare_speeds, fit_speeds

EQUAL_MEMORY = 1.02  # within this factor two peaks count as equal, and the number of workers decides


@dataclasses.dataclass(frozen=True)
class Recommendation:
    """The combination to use (None if there is none), what is known of it, and the reasons in sentences.

    Attributes:
      gain: speed over the config as given; None if that was not measured, or is the recommended one.
      tied: other combinations that are as fast within noise.
      knobs: effect of each swept knob.
    """

    text: tuple[str, ...]
    knobs: tuple[dict[str, Any], ...]
    noise_percent: float | None
    best: Combination | None = None
    samples_per_sec: float | None = None
    samples_per_sec_ci95: tuple[float, float] | None = None
    gain: SpeedRatio | None = None
    tied: tuple[Combination, ...] = ()
    learning_rate_advice: dict[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Returns the conclusion of the JSON file."""
        interval = self.samples_per_sec_ci95
        return {
            "best": self.best.to_dict() if self.best else None,
            "samples_per_sec": self.samples_per_sec,
            "samples_per_sec_ci95": list(interval) if interval else None,
            "gain": self.gain.to_dict() if self.gain else None,
            "tied": [combination.to_dict() for combination in self.tied],
            "text": list(self.text),
            "knobs": list(self.knobs),
            "noise_percent": self.noise_percent,
            "learning_rate_advice": self.learning_rate_advice,
        }


def recommend(rows: Sequence[SweepRow], *, config: Config, fixed_batch: int | None = None) -> Recommendation:
    """Recommends the fastest combination; of those that are the same within noise, the least memory, then workers.

    A row that leaks is recommended only if all do, one whose loss is not finite never.

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
    best, tied, fastest = choose(candidates, model)
    given = Combination.of(config)
    gain = next((compare_speeds(best, row, model) for row in measured if row.combination == given), None)
    text = [
        f"Use {best.combination.label}: {rate(best)}.",
        *([f"That is {gain} the speed of the config as given."] if gain and best.combination != given else []),
        *(["That is the config as given."] if best.combination == given else []),
        *tie_sentences(best, tied, fastest),
        resolution_sentence(model, repeats=len(best.speeds)),
        what_limits(best),
        *remarks,
        *(knob["text"] for knob in knobs),
        *batch_sentences(config, best.combination),
    ]
    return Recommendation(
        text=tuple(text),
        knobs=knobs,
        noise_percent=model.noise_percent,
        best=best.combination,
        samples_per_sec=best.samples_per_sec,
        samples_per_sec_ci95=best.samples_per_sec_ci95,
        gain=gain if best.combination != given else None,
        tied=tuple(row.combination for row in tied),
        learning_rate_advice=learning_rate_advice(config, best.combination.batch_size),
    )


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
    candidates: Sequence[SweepRow], model: SpeedModel, most_loss: float = 1.0
) -> tuple[SweepRow, list[SweepRow], SweepRow]:
    """Returns the row to use, the others that are as fast within noise, and the fastest of all.

    Args:
      most_loss: relative loss of speed that a reading may show and still count as noise.
    """
    fastest = max(candidates, key=model.effect)
    # The fastest of many readings is partly the luckiest: all comparisons with it have to be right together.
    level = 1 - (1 - CONFIDENCE) / max(1, len(candidates) - 1)
    ratios = [compare_speeds(row, fastest, model, level) for row in candidates]
    tied = [
        row
        for row, found in zip(candidates, ratios, strict=True)
        if row is fastest or (found.verdict == SAME and found.ratio >= 1 - most_loss)
    ]
    memory = {row.combination: memory_needed(row, candidates) for row in tied}
    preference = functools.partial(_preference, memory=memory, model=model)
    best = min(tied, key=preference)
    return best, [row for row in tied if row is not best], fastest


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


def tie_sentences(best: SweepRow, tied: Sequence[SweepRow], fastest: SweepRow) -> list[str]:
    if best is not fastest:
        return [
            f"The fastest reading was {rate(fastest)} with {fastest.combination.label}: the same within noise, "
            "with more memory or more workers."
        ]
    if not tied:
        return []
    others = f"{len(tied)} other combination" + ("s are" if len(tied) > 1 else " is")
    return [f"{others} as fast within noise; this one takes the least memory, then the fewest workers."]
