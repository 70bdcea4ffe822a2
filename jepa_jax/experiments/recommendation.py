"""Which combination to use, from the rows of a sweep or a search, and the reasons in words.

`data.batch_size` counts the images of one optimizer step, also with accumulation, which computes it in parts: the
effective batch is the batch size.
"""

import collections
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from jepa_jax.base.statistics import (
    FASTER,
    SAME,
    UNKNOWN,
    SpeedModel,
    SpeedRatio,
    bonferroni_level,
    compare_speeds,
    fit_speeds,
)
from jepa_jax.config.groups import Config
from jepa_jax.experiments.rows import OK, PENDING, SKIPPED, SweepRow
from jepa_jax.experiments.settings import KNOBS, Combination
from jepa_jax.methods.whole_batch import accumulation_effect
from jepa_jax.program.optim import scaled_learning_rate

EQUAL_MEMORY = 1.02  # within this factor two peaks count as equal, and the number of workers decides
MOST_LOSS = 0.01  # of the fastest reading's speed, that a choice with less memory or fewer workers may give away
WAITING = 0.10  # share of a step from which waiting for data counts as the limit
FULL_SHARE = 0.85  # share of the memory from which it counts as the limit
WORTH_SEEING = 0.05  # relative difference of speeds that is worth more repeats
MOST_PROMISED = 10.0  # times the speed: where a device waits for 90 % of the time, its own speed is hardly known

# What is shown about the config as given.
SHOWN, KEEP = "faster than the config", "nothing shown: keep the config"
AS_GIVEN, NO_CONFIG = "the config is the fastest", "the config cannot be kept"

# Effects of a knob.
BY_CONSTRUCTION, NOT_MEASURABLE, EFFECT = "none by construction", "none measurable", "effect"

Pair = tuple[SweepRow, SweepRow]


@dataclasses.dataclass(frozen=True)
class SettingsChoice:
    """What to use: the leader if it is shown to be faster than the config as given, otherwise that config.

    Attributes:
      best: the row to use.
      leader: the fastest, or the lightest of those that are as fast within noise and MOST_LOSS.
      tied: rows other than the leader that are as fast within noise and MOST_LOSS.
      gain: speed of the leader over the config; None if it is the config, or the config was not measured.
      verdict: SHOWN | KEEP | AS_GIVEN | NO_CONFIG.
      compared: how many other rows could have been chosen.
    """

    best: SweepRow
    leader: SweepRow
    tied: tuple[SweepRow, ...]
    gain: SpeedRatio | None
    verdict: str
    compared: int


@dataclasses.dataclass(frozen=True)
class Recommendation:
    """The choice (None if there is nothing to recommend), the reasons in sentences, and the effect of each knob."""

    choice: SettingsChoice | None
    text: tuple[str, ...]
    knobs: tuple[dict[str, Any], ...]
    noise_percent: float | None

    @property
    def best(self) -> Combination | None:
        return self.choice.best.combination if self.choice else None

    def to_dict(self, config: Config | None) -> dict[str, Any]:
        """Returns the conclusion of the JSON file; a gain that is not shown is kept apart."""
        choice, best = self.choice, self.best
        interval = choice.best.samples_per_sec_ci95 if choice else None
        gain = choice.gain.to_dict() if choice and choice.gain else None
        kept = choice.leader.combination.to_dict() if choice and choice.verdict == KEEP else None
        return {
            "best": best.to_dict() if best else None,
            "samples_per_sec": choice.best.samples_per_sec if choice else None,
            "samples_per_sec_ci95": list(interval) if interval else None,
            "verdict": choice.verdict if choice else None,
            "gain": None if kept else gain,
            "not_shown": {"combination": kept, **gain} if kept and gain else None,
            "tied": [row.combination.to_dict() for row in choice.tied] if choice else [],
            "text": list(self.text),
            "knobs": list(self.knobs),
            "noise_percent": self.noise_percent,
            "learning_rate_advice": learning_rate_advice(config, best.batch_size) if config and best else None,
        }


def recommend(rows: Sequence[SweepRow], *, config: Config, fixed_batch: int | None = None) -> Recommendation:
    """Recommends a combination of any batch size, or of `fixed_batch`; gains refer to the config as given.

    A row that leaks is recommended only if all do, one whose loss is not finite never.
    """
    model = fit_speeds(rows)
    measured = [row for row in rows if row.is_measured]
    allowed = [row for row in measured if fixed_batch in (None, row.combination.batch_size)]
    candidates, remarks = sound_rows(allowed)
    failures = collections.Counter(row.status for row in rows if row.status not in (OK, PENDING, SKIPPED))
    if failures:
        parts = ", ".join(f"{count} {status.replace('_', ' ')}" for status, count in failures.most_common())
        remarks.insert(0, f"{failures.total()} of {len(rows)} combinations failed: {parts}.")
    knobs = tuple(knob_effects(rows, model))
    if not candidates:
        of_batch = "" if fixed_batch is None else f" with a batch of {fixed_batch:,} images"
        why = "no combination has a finite loss" if allowed else f"no combination{of_batch} could be measured"
        return Recommendation(None, (f"Nothing to recommend: {why}.", *remarks), knobs, model.noise_percent)
    given = Combination.of(config).without_idle_workers()
    choice = choose_settings(candidates, model, next((row for row in measured if row.combination == given), None))
    text = (
        *choice_sentences(choice),
        resolution_sentence(model, len(choice.best.speeds)),
        what_limits(choice.best),
        *remarks,
        *(knob["text"] for knob in knobs),
        *batch_sentences(config, choice.best.combination),
    )
    return Recommendation(choice, text, knobs, model.noise_percent)


def sound_rows(rows: Sequence[SweepRow]) -> tuple[list[SweepRow], list[str]]:
    """Returns the rows that may be recommended, and sentences about those that may not."""

    def labels(found: Sequence[SweepRow]) -> str:
        return ", ".join(row.combination.label for row in found)

    remarks = []
    finite = [row for row in rows if row.finite]
    if diverging := [row for row in rows if not row.finite]:
        remarks.append(f"The loss is not finite, so not recommended: {labels(diverging)}.")
    steady = [row for row in finite if not row.leak]
    if leaking := [row for row in finite if row.leak]:
        remarks.append(
            f"Memory grows from step to step, so not recommended: {labels(leaking)}."
            if steady
            else "All rows leak: a long run with this combination will run out of memory."
        )
    return steady or finite, remarks


def choose_settings(
    candidates: Sequence[SweepRow], model: SpeedModel, given: SweepRow | None = None, comparisons: int | None = None
) -> SettingsChoice:
    """Chooses among measured rows, see `SettingsChoice`.

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
    least = min(row.memory_bytes for row in tied)

    def preference(row: SweepRow) -> tuple[bool, float, int, float]:
        """Sorts by memory unless it is close to the least, then by workers, then by speed."""
        light = row.memory_bytes <= EQUAL_MEMORY * least
        return not light, 0.0 if light else row.memory_bytes, row.combination.num_workers, -model.effect(row)

    leader, gain, compared = min(tied, key=preference), None, max(others, comparisons or 0)
    if given is not None and given.combination != leader.combination:
        gain = compare_speeds(leader, given, model, bonferroni_level(compared))
    can_keep = given is not None and any(row.combination == given.combination for row in candidates)
    if not can_keep:
        verdict = NO_CONFIG
    elif gain is None:
        verdict = AS_GIVEN
    else:
        verdict = SHOWN if gain.verdict == FASTER else KEEP
    best = given if verdict == KEEP and given is not None else leader
    return SettingsChoice(best, leader, tuple(row for row in tied if row is not leader), gain, verdict, compared)


def rate(row: SweepRow) -> str:
    """Returns the speed of a measured row in words: 1,234 samples/s (1,220 to 1,248)."""
    speed, interval = row.samples_per_sec or 0.0, row.samples_per_sec_ci95
    digits = 0 if speed >= 100 else 1
    text = f"{speed:,.{digits}f} samples/s"
    return text + (f" ({interval[0]:,.{digits}f} to {interval[1]:,.{digits}f})" if interval else "")


def choice_sentences(
    choice: SettingsChoice, given: str = "the config as given", why_not: str = "it was not measured"
) -> list[str]:
    """Returns what to use and its gain over `given`, or why that cannot be kept."""
    best, gain, verdict = choice.best, choice.gain, choice.verdict
    label = best.combination.label
    if verdict == KEEP:
        why = "the interval contains 1" if gain and math.isfinite(gain.high) else "nothing can be told from noise"
        leader = f"The fastest of the others, {choice.leader.combination.label}, is {gain} its speed: {why}."
        return [f"No significant speed-up: keep {given} ({label}): {rate(best)}.", leader]
    sentences = [f"Use {label}: {rate(best)}."]
    if verdict == AS_GIVEN:
        others = "No other usable combination is faster." if choice.compared else "No other combination was measured."
        sentences = [f"Keep {given} ({label}): {rate(best)}. {others}"]
    elif verdict == SHOWN:
        sentences.append(f"That is {gain} the speed of {given}; the interval holds for all comparisons together.")
    else:
        compared = f"; this is {gain} its speed" if gain and math.isfinite(gain.ratio) else ""
        sentences.append(f"{given[0].upper()}{given[1:]} cannot be kept: {why_not}{compared}.")
    if choice.tied:
        sentences.append(
            f"The same within noise and {100 * MOST_LOSS:.0f} % of the fastest reading: {len(choice.tied)} others; "
            "this one takes the least memory, then the fewest workers."
        )
    return sentences


def resolution_sentence(model: SpeedModel, repeats: int) -> str:
    """Says what so many repeats can tell apart, and how many would tell more."""
    if model.noise_percent is None:
        return "Each combination was measured once: no difference can be told from noise (--repeats=3)."
    scatter = f"One repeat scatters by {model.noise_percent:.1f} %"
    if repeats < 2:
        return f"{scatter}."
    seen = model.resolution(repeats)
    sentence = f"{scatter}: with {repeats} repeats a difference of less than {100 * seen:.1f} % stays within noise"
    if seen <= WORTH_SEEING:
        return f"{sentence}."
    needed = model.repeats_to_resolve(WORTH_SEEING)
    return f"{sentence}, and about {needed} would show one of {100 * WORTH_SEEING:.0f} %."


def what_limits(row: SweepRow, memory_limit_bytes: float | None = None) -> str:
    """Says what a faster setting would have to change; by default the memory is that of the device's allocator."""
    wait, memory = row.mean("data_wait_fraction"), row.largest("peak_memory_bytes")
    limit = memory_limit_bytes or row.shared("device_limit_bytes")
    if wait is not None and wait > WAITING:
        factor = 1 / max(1 - wait, 1e-3)
        gain = f"at most {factor:.2f}x" if factor < MOST_PROMISED else f"more than {MOST_PROMISED:.0f}x"
        return (
            f"The loader limits: the device waits for data for {100 * wait:.0f} % of the time, {gain} to gain "
            "(use more workers, up to the number of cores, smaller or decoded data, or data.pipeline=device)."
        )
    if memory and limit and memory / limit > FULL_SHARE:
        share = 100 * memory / limit
        return f"Memory limits the batch: {share:.0f} % of the available memory is used; computing limits the speed."
    waiting = "" if wait is None else f": the device waits for data for {100 * wait:.1f} % of the time"
    mfu = row.mean("mfu")
    return f"Computing limits{waiting}" + (f", at {100 * mfu:.0f} % of the device's peak." if mfu else ".")


def learning_rate_advice(config: Config, batch_size: int) -> dict[str, Any] | None:
    """Returns the peak rate by the linear and the square-root rule, and the `optim.lr` that gives it.

    None if the batch is that of the config.
    """
    before, optim = config.data.batch_size, config.optim
    if batch_size == before:
        return None
    scaling, reference = optim.batch_scaling, optim.reference_batch
    factor = scaled_learning_rate(1.0, batch_size, scaling, reference)  # from optim.lr to the peak, at the new batch
    peak = scaled_learning_rate(optim.lr, before, scaling, reference)
    ratio = batch_size / before
    rules = {"linear": peak * ratio, "sqrt": peak * math.sqrt(ratio)}
    advice = {name: {"peak": value, "optim.lr": value / factor} for name, value in rules.items()}
    already = f"optim.batch_scaling = {scaling} " + (
        "does not change the rate by itself"
        if scaling == "none"
        else "follows its rule already: keep optim.lr for that"
    )
    text = (
        f"The batch also changes what is learned: {before:,} -> {batch_size:,} images per step. "
        f"The peak rate of {peak:.3g} would be "
        f"{rules['linear']:.3g} by the linear rule (optim.lr={advice['linear']['optim.lr']:.3g}), "
        f"{rules['sqrt']:.3g} by the square-root rule (optim.lr={advice['sqrt']['optim.lr']:.3g}). {already}."
    )
    return {"batch_size": [before, batch_size], "peak": peak, "batch_scaling": scaling, **advice, "text": text}


def batch_sentences(config: Config, chosen: Combination) -> list[str]:
    """Says what a combination changes in what is learned: the learning rate, and the images that losses see."""
    advice = learning_rate_advice(config, chosen.batch_size)
    sentences = [advice["text"]] if advice else []
    before, after = config.train.accum_steps, chosen.grad_accum_steps
    if before != after:
        part = chosen.batch_size // after
        sentences.append(f"Accumulation {before} -> {after}, {part:,} images per part. {accumulation_effect(config)}")
    return sentences


def knob_effects(rows: Sequence[SweepRow], model: SpeedModel) -> list[dict[str, Any]]:
    """Returns an entry of the JSON conclusion for every knob that has several values.

    Every value is compared with the knob's first one. `effect` is "none by construction" where program and pipeline are
    the same, and "none measurable" where the interval of the mean ratio holds 1 and no single pair stands out.
    """
    entries = []
    for knob in KNOBS:
        first, *others = sorted({getattr(row.combination, knob) for row in rows}) or [None]
        comparisons = [compare_values(knob, first, value, rows, model) for value in others]
        effects = {entry["effect"] for entry in comparisons}
        text = f"{knob}: " + "; ".join(entry.pop("text") for entry in comparisons) + "."
        for effect in (EFFECT, NOT_MEASURABLE, UNKNOWN, BY_CONSTRUCTION):
            if effect in effects:
                entries.append({"knob": knob, "effect": effect, "comparisons": comparisons, "text": text})
                break
    return entries


def compare_values(knob: str, first: Any, value: Any, rows: Sequence[SweepRow], model: SpeedModel) -> dict[str, Any]:
    measured = {row.combination: row for row in rows if row.is_measured}
    changed = {c: dataclasses.replace(c, **{knob: value}) for c in measured if getattr(c, knob) == first}
    pairs = [(measured[a], measured[b]) for a, b in changed.items() if b in measured]  # equal in every other knob
    same = [pair for pair in pairs if pair[0].same_execution(pair[1])]
    different = [pair for pair in pairs if pair not in same]
    entry: dict[str, Any] = {
        "from": first, "to": value, "pairs": len(different), "pairs_by_construction": len(same),
        "ratio": None, "interval": None, "smallest": None, "largest": None,
    }  # fmt: skip
    used = [pair for pair in different or same if math.isfinite(mean_ratio([pair], model).ratio)]
    if not used:
        return entry | {"effect": UNKNOWN, "text": f"{first} and {value} were not measured with all else equal"}
    mean = mean_ratio(used, model)
    # One pair may gain what another loses, so each is tested too, at a stricter level the more there are.
    singles = [mean_ratio([pair], model, 1 - 0.05 / len(used)) for pair in used]
    ratios = [single.ratio for single in singles]
    entry |= mean.to_dict() | {"smallest": min(ratios), "largest": max(ratios)}
    entry.pop("verdict")
    if not different:
        effect, words = BY_CONSTRUCTION, "no effect by construction, "
    elif mean.verdict == UNKNOWN:
        effect, words = UNKNOWN, ""
    elif mean.verdict == SAME and all(single.verdict == SAME for single in singles):
        effect, words = NOT_MEASURABLE, "no measurable effect, "
    else:
        effect, words = EFFECT, ""
    span = f", {min(ratios):.2f} to {max(ratios):.2f} depending on the other settings" if len(used) > 1 else ""
    return entry | {"effect": effect, "text": f"{words}{value} is {mean} {first}{span}"}


def mean_ratio(pairs: Sequence[Pair], model: SpeedModel, level: float = 0.95) -> SpeedRatio:
    """Returns the geometric mean of the ratios b / a over pairs (a, b)."""
    weights: dict[Combination, float] = collections.defaultdict(float)
    for a, b in pairs:
        weights[b.combination] += 1 / len(pairs)
        weights[a.combination] -= 1 / len(pairs)
    return model.contrast(weights, level)
