"""What a sweep says: which combination to use, which of the swept knobs matter, what else to change with the batch.

Pure functions of rows (`docs/guides/throughput.md` has their keys). `data.batch_size` is the images of one optimizer
step, also with accumulation, which computes it in parts: the effective batch is the batch size.
"""

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jepa_jax.tuning.noise import (
    CONFIDENCE,
    SAME,
    UNKNOWN,
    Comparison,
    Fit,
    Key,
    Row,
    compare,
    fit,
    row_key,
    speeds,
    t_interval,
    typical,
)
from jepa_jax.tuning.trial import KNOBS, Combination, combination_of

__all__ = [
    "Comparison", "KNOBS", "compare", "conclude", "describe", "fit", "knob_effects", "learning_rate_advice",
    "memory_of", "t_interval", "typical", "what_limits",
]  # fmt: skip

BY_CONSTRUCTION, NOT_MEASURABLE, EFFECT = "none by construction", "none measurable", "effect"
EQUAL_MEMORY = 1.02  # within this factor two peaks count as equal, and the number of workers decides
# Shares of a step above which something is named as what limits.
WAITING, FULL = 0.10, 0.85
WORTH_SEEING = 0.05  # a difference of speeds for which one would measure more
MOST_TOLD = 10.0  # times the speed: where a device waits for 90 % of the time, its own speed is hardly known


def conclude(
    rows: Sequence[Row],
    *,
    config: Mapping[str, Any],
    fixed_effective_batch: int | None = None,
    memory_limit_bytes: float | None = None,
) -> dict[str, Any]:
    """The choice and its reasons: best, its gain over the config as given, tied, text, knobs, ...

    Best is the fastest; of those that are the same within noise, the one with less memory, then with fewer workers.
    A row that leaks is chosen only if all do, one whose loss is not finite never. `fixed_effective_batch` leaves rows
    of that batch size alone; `memory_limit_bytes` is what may be used, by default what the device's allocator has.
    """
    model = fit(rows)
    measured = [row for row in rows if row["status"] == "ok" and speeds(row)]
    text = [failure_sentence(rows)] if any(is_failure(row) for row in rows) else []
    allowed = measured
    if fixed_effective_batch is not None:
        allowed = [row for row in measured if row["combination"]["batch_size"] == fixed_effective_batch]
        text.append(f"The batch is kept at {fixed_effective_batch:,} images: {len(allowed)} of {len(measured)} fit.")
    finite = [row for row in allowed if is_finite(row)]
    if len(finite) < len(allowed):
        diverging = ", ".join(describe(row["combination"]) for row in allowed if not is_finite(row))
        text.append(f"The loss is not finite, so not recommended: {diverging}.")
    sound = [row for row in finite if not row.get("leak")]
    if len(sound) < len(finite):
        leaking = ", ".join(describe(row["combination"]) for row in finite if row.get("leak"))
        text.append(f"Memory grows from step to step, so not recommended: {leaking}.")
        if not sound:
            text.append("All rows leak: the choice below will run out of memory some day.")
    knobs = knob_effects(rows, model)
    result: dict[str, Any] = {
        "best": None, "samples_per_sec": None, "samples_per_sec_ci95": None, "gain": None, "tied": [], "text": text,
        "knobs": knobs, "noise_percent": model.noise_percent, "learning_rate_advice": None,
    }  # fmt: skip
    candidates = sound or finite
    if not candidates:
        text.insert(0, "Nothing to recommend: " + why_none(measured, allowed, fixed_effective_batch))
        return result
    best, tied, fastest = choose(candidates, model)
    combination = best["combination"]
    advice = learning_rate_advice(config, combination["batch_size"])
    given = combination_of(config).as_dict()
    gain = next((compare(best, row, model) for row in measured if row["combination"] == given), None)
    text[:0] = choice_sentences(best, tied, fastest, model, gain, memory_limit_bytes)
    text += [knob["text"] for knob in knobs]
    text += [advice["text"]] if advice else []
    text += accumulation_sentences(config, combination)
    return result | {
        "best": dict(combination),
        "samples_per_sec": best["samples_per_sec"],
        "samples_per_sec_ci95": best.get("samples_per_sec_ci95"),
        "gain": gain.as_dict() if gain and combination != given else None,
        "tied": [dict(row["combination"]) for row in tied],
        "learning_rate_advice": advice,
    }


def why_none(measured: Sequence[Row], allowed: Sequence[Row], batch_size: int | None) -> str:
    if allowed:
        return "no combination has a finite loss."
    if measured:
        return f"no combination with a batch of {batch_size:,} images could be measured."
    return "no combination was measured."


def is_finite(row: Row) -> bool:
    """Whether every loss that was seen is a number."""
    return row.get("finite", True) is not False


def choose(candidates: Sequence[Row], model: Fit, most_loss: float = 1.0) -> tuple[Row, list[Row], Row]:
    """The row to use, the others that are as fast within noise, and the fastest of all.

    `most_loss`: of speed that a reading may show and still count as noise.
    """
    fastest = max(candidates, key=model.effect)
    # The fastest of many readings is partly the luckiest: so many comparisons with it have to be right together.
    level = 1 - (1 - CONFIDENCE) / max(1, len(candidates) - 1)

    def is_tied(row: Row) -> bool:
        found = compare(row, fastest, model, level)
        return found.verdict == SAME and found.ratio >= 1 - most_loss

    tied = [row for row in candidates if row is fastest or is_tied(row)]

    def memory_needed(row: Row) -> float:
        """What runs the same program from the same pipeline needs the same memory: readings of processes vary."""
        return min(memory_of(other) for other in candidates if other is row or same_execution(other, row))

    least = min(memory_needed(row) for row in tied)

    def preference(row: Row) -> tuple:
        memory = memory_needed(row)
        light = memory <= EQUAL_MEMORY * least
        return (not light, 0 if light else memory, row["combination"]["num_workers"], -model.effect(row))

    best = min(tied, key=preference)
    return best, [row for row in tied if row is not best], fastest


def memory_of(row: Row) -> float:
    """Peak of the device's allocator; where there is none (CPU), of the processes; infinite if neither is known."""
    for name in ("peak_memory_bytes", "process_memory_bytes"):
        if row.get(name):
            return float(row[name])
    return math.inf


def describe(combination: Mapping[str, Any]) -> str:
    return Combination.from_dict(combination).label


def rate(row: Row) -> str:
    """1,234 images/s (1,220 to 1,248)."""
    interval = row.get("samples_per_sec_ci95")
    digits = 0 if row["samples_per_sec"] >= 100 else 1
    text = f"{row['samples_per_sec']:,.{digits}f} images/s"
    return text + (f" ({interval[0]:,.{digits}f} to {interval[1]:,.{digits}f})" if interval else "")


def choice_sentences(
    best: Row,
    tied: Sequence[Row],
    fastest: Row,
    model: Fit,
    gain: Comparison | None,
    memory_limit_bytes: float | None,
) -> list[str]:
    """`gain`: over the config as given, if it was measured."""
    sentences = [f"Use {describe(best['combination'])}: {rate(best)}."]
    if gain is not None:
        same = gain.low == gain.high == 1
        sentences.append(
            "That is the config as given." if same else f"That is {gain} the speed of the config as given."
        )
    if best is not fastest:
        sentences.append(
            f"The fastest reading was {rate(fastest)} with {describe(fastest['combination'])}: the same within noise, "
            "at more memory or with more workers."
        )
    elif tied:
        others = f"{len(tied)} other combination" + ("s are" if len(tied) > 1 else " is")
        sentences.append(f"{others} as fast within noise; this one takes the least memory, then the fewest workers.")
    if model.noise_percent is None:
        sentences.append("Each combination was measured once: no difference can be told from noise (--repeats=3).")
    else:
        sentences.append(resolution_sentence(model, repeats=len(speeds(best))))
    return [*sentences, what_limits(best, memory_limit_bytes)]


def resolution_sentence(model: Fit, repeats: int) -> str:
    """What this sweep can tell apart, and what it would take to tell more."""
    scatter = f"One repeat scatters by {model.noise_percent:.1f} %"
    if repeats < 2:
        return f"{scatter}."
    seen = model.resolution(repeats)
    sentence = f"{scatter}: with {repeats} repeats a difference of less than {100 * seen:.1f} % stays within noise"
    if seen <= WORTH_SEEING:
        return f"{sentence}."
    needed = model.repeats_to_resolve(WORTH_SEEING)
    return f"{sentence}, and about {needed} would show one of {100 * WORTH_SEEING:.0f} %."


def what_limits(row: Row, memory_limit_bytes: float | None = None) -> str:
    """What a faster setting would have to change; `memory_limit_bytes`: by default what the device's allocator has."""
    wait, memory = row.get("data_wait_fraction"), row.get("peak_memory_bytes")
    limit = memory_limit_bytes or row.get("device_limit_bytes")
    full = memory / limit if memory and limit else None
    if wait is not None and wait > WAITING:
        return (
            f"The loader limits: {100 * wait:.0f} % of the time the device waits for data, "
            f"{at_most(1 / max(1 - wait, 1e-3))} to gain."
        )
    if full is not None and full > FULL:
        return f"Memory limits the batch: {100 * full:.0f} % of what there is is used; computing limits the speed."
    waiting = "" if wait is None else f": {100 * wait:.1f} % of the time the device waits for data"
    mfu = row.get("mfu")
    return f"Computing limits{waiting}" + (f", at {100 * mfu:.0f} % of the device's peak." if mfu else ".")


def at_most(factor: float) -> str:
    return f"at most {factor:.2f}x" if factor < MOST_TOLD else f"more than {MOST_TOLD:.0f}x"


def is_failure(row: Row) -> bool:
    return row["status"] not in ("ok", "pending", "skipped")


def failure_sentence(rows: Sequence[Row]) -> str:
    counts = collections.Counter(row["status"] for row in rows if is_failure(row))
    parts = ", ".join(f"{count} {status.replace('_', ' ')}" for status, count in counts.most_common())
    return f"{sum(counts.values())} of {len(rows)} combinations failed: {parts}."


def learning_rate_advice(config: Mapping[str, Any], batch_size: int) -> dict[str, Any] | None:
    """Peak rate by the linear and the square-root rule, and the `optim.lr` that gives it; None for the same batch."""
    before, optim = config["data"]["batch_size"], config["optim"]
    if batch_size == before:
        return None
    from jepa_jax.program.optim import scaled_learning_rate

    lr, scaling, reference = optim["lr"], optim["batch_scaling"], optim["reference_batch"]
    factor = scaled_learning_rate(1.0, batch_size, scaling, reference)  # from optim.lr to the peak, at the new batch
    peak = scaled_learning_rate(lr, before, scaling, reference)
    ratio = batch_size / before
    rules = {"linear": peak * ratio, "sqrt": peak * math.sqrt(ratio)}
    advice = {name: {"peak": value, "optim.lr": value / factor} for name, value in rules.items()}
    already = {
        "none": "optim.batch_scaling = none: nothing is scaled by itself",
        "linear": "optim.batch_scaling = linear follows the linear rule already: leave optim.lr for that",
        "sqrt": "optim.batch_scaling = sqrt follows the square-root rule already: leave optim.lr for that",
    }[scaling]
    text = (
        f"A batch is also a learning choice: {before:,} -> {batch_size:,} images a step. "
        f"The peak rate of {peak:.3g} would be "
        f"{rules['linear']:.3g} by the linear rule (optim.lr={advice['linear']['optim.lr']:.3g}), "
        f"{rules['sqrt']:.3g} by the square-root rule (optim.lr={advice['sqrt']['optim.lr']:.3g}). {already}."
    )
    return {"batch_size": [before, batch_size], "peak": peak, "batch_scaling": scaling, **advice, "text": text}


def accumulation_sentences(config: Mapping[str, Any], combination: Mapping[str, Any]) -> list[str]:
    """Losses and norms over a batch see a part of it."""
    before, after = config["train"]["accum_steps"], combination["grad_accum_steps"]
    if before == after:
        return []
    part = combination["batch_size"] // after
    return [f"Accumulation {before} -> {after}: losses and norms over a batch see {part:,} images at a time."]


@dataclasses.dataclass
class _Pairs:
    """Rows that differ in one knob alone, by whether anything was compiled or loaded differently."""

    same: list[tuple[Row, Row]]
    different: list[tuple[Row, Row]]


def knob_effects(rows: Sequence[Row], model: Fit | None = None) -> list[dict[str, Any]]:
    """For each swept knob: what it does to speed between combinations that are equal in everything else.

    Every value is compared with the knob's first one. `effect`: "none by construction" where program and pipeline are
    the same; "none measurable" where the interval of the mean ratio holds 1 and no single pair stands out.
    """
    model = fit(rows) if model is None else model
    return [
        knob_effect(knob, rows, model) for knob in KNOBS if len({row["combination"][knob] for row in rows}) > 1
    ]  # fmt: skip


def knob_effect(knob: str, rows: Sequence[Row], model: Fit) -> dict[str, Any]:
    first, *others = sorted({row["combination"][knob] for row in rows})
    comparisons = [compare_values(knob, first, value, rows, model) for value in others]
    effects = {entry["effect"] for entry in comparisons}
    effect = next(e for e in (EFFECT, NOT_MEASURABLE, UNKNOWN, BY_CONSTRUCTION) if e in effects)
    text = f"{knob}: " + "; ".join(entry.pop("text") for entry in comparisons) + "."
    return {"knob": knob, "effect": effect, "comparisons": comparisons, "text": text}


def compare_values(knob: str, first: Any, value: Any, rows: Sequence[Row], model: Fit) -> dict[str, Any]:
    pairs = pair_rows(knob, first, value, rows)
    entry: dict[str, Any] = {
        "from": first, "to": value, "pairs": len(pairs.different), "pairs_by_construction": len(pairs.same),
        "ratio": None, "interval": None, "smallest": None, "largest": None,
    }  # fmt: skip
    used = [pair for pair in pairs.different or pairs.same if math.isfinite(compare(*pair, model).ratio)]
    if not used:
        return entry | {"effect": UNKNOWN, "text": f"{first} and {value} were not measured with all else equal"}
    mean = mean_ratio(used, model)
    # One pair may gain what another loses: each is looked at too, more strictly the more there are.
    singles = [model.contrast({row_key(b): 1.0, row_key(a): -1.0}, 1 - 0.05 / len(used)) for a, b in used]
    ratios = [single.ratio for single in singles]
    entry |= mean.as_dict() | {"smallest": min(ratios), "largest": max(ratios)}
    entry.pop("verdict")
    if not pairs.different:
        words = f"no effect by construction, {first} and {value} are the same program and pipeline (measured {mean})"
        return entry | {"effect": BY_CONSTRUCTION, "text": words}
    rest = f", and by construction none in {len(pairs.same)} other pairs" if pairs.same else ""
    if mean.verdict == UNKNOWN:
        return entry | {"effect": UNKNOWN, "text": f"{value} is {mean} {first}{rest}"}
    if mean.verdict == SAME and all(single.verdict == SAME for single in singles):
        return entry | {"effect": NOT_MEASURABLE, "text": f"no measurable effect, {value} is {mean} {first}{rest}"}
    span = f", {min(ratios):.2f} to {max(ratios):.2f} by what goes with it" if len(used) > 1 else ""
    return entry | {"effect": EFFECT, "text": f"{value} is {mean} {first}{span}{rest}"}


def pair_rows(knob: str, first: Any, value: Any, rows: Sequence[Row]) -> _Pairs:
    """Measured rows with `first` and with `value` that are equal in every other knob."""
    groups: dict[Key, dict[Any, Row]] = {}
    for row in rows:
        if row["status"] == "ok" and speeds(row):
            rest = tuple(pair for pair in row_key(row) if pair[0] != knob)
            groups.setdefault(rest, {})[row["combination"][knob]] = row
    pairs = _Pairs([], [])
    for group in groups.values():
        if first in group and value in group:
            a, b = group[first], group[value]
            (pairs.same if same_execution(a, b) else pairs.different).append((a, b))
    return pairs


def same_execution(a: Row, b: Row) -> bool:
    """The same compiled program, fed by the same pipeline."""
    return all(a.get(name) and a.get(name) == b.get(name) for name in ("program_fingerprint", "pipeline_fingerprint"))


def mean_ratio(pairs: Sequence[tuple[Row, Row]], model: Fit) -> Comparison:
    """The geometric mean of the ratios b / a."""
    weights: dict[Key, float] = collections.defaultdict(float)
    for a, b in pairs:
        weights[row_key(b)] += 1 / len(pairs)
        weights[row_key(a)] -= 1 / len(pairs)
    return model.contrast(weights)
