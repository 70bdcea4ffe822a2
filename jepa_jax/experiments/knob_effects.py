"""What each swept knob does to the speed, between combinations that are equal in everything else."""

import collections
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from jepa_jax.base.statistics import SAME, UNKNOWN, SpeedModel, SpeedRatio
from jepa_jax.experiments.rows import SweepRow
from jepa_jax.experiments.settings import KNOBS, Combination

BY_CONSTRUCTION, NOT_MEASURABLE, EFFECT = "none by construction", "none measurable", "effect"

Pair = tuple[SweepRow, SweepRow]


def knob_effects(rows: Sequence[SweepRow], model: SpeedModel) -> list[dict[str, Any]]:
    """Returns an entry of the JSON conclusion for every knob that has several values.

    Every value is compared with the knob's first one. `effect` is "none by construction" where program and pipeline are
    the same, and "none measurable" where the interval of the mean ratio holds 1 and no single pair stands out.
    """
    values = {knob: sorted({getattr(row.combination, knob) for row in rows}) for knob in KNOBS}
    return [knob_effect(knob, found, rows, model) for knob, found in values.items() if len(found) > 1]


def knob_effect(knob: str, values: Sequence[Any], rows: Sequence[SweepRow], model: SpeedModel) -> dict[str, Any]:
    comparisons = [compare_values(knob, values[0], value, rows, model) for value in values[1:]]
    effects = {entry["effect"] for entry in comparisons}
    effect = next(e for e in (EFFECT, NOT_MEASURABLE, UNKNOWN, BY_CONSTRUCTION) if e in effects)
    text = f"{knob}: " + "; ".join(entry.pop("text") for entry in comparisons) + "."
    return {"knob": knob, "effect": effect, "comparisons": comparisons, "text": text}


def compare_values(knob: str, first: Any, value: Any, rows: Sequence[SweepRow], model: SpeedModel) -> dict[str, Any]:
    pairs = pair_rows(knob, first, value, rows)
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
        text = f"no effect by construction, {first} and {value} are the same program and pipeline (measured {mean})"
        return entry | {"effect": BY_CONSTRUCTION, "text": text}
    rest = f", and by construction none in {len(same)} other pairs" if same else ""
    if mean.verdict == UNKNOWN:
        return entry | {"effect": UNKNOWN, "text": f"{value} is {mean} {first}{rest}"}
    if mean.verdict == SAME and all(single.verdict == SAME for single in singles):
        return entry | {"effect": NOT_MEASURABLE, "text": f"no measurable effect, {value} is {mean} {first}{rest}"}
    span = f", {min(ratios):.2f} to {max(ratios):.2f} depending on the other settings" if len(used) > 1 else ""
    return entry | {"effect": EFFECT, "text": f"{value} is {mean} {first}{span}{rest}"}


def pair_rows(knob: str, first: Any, value: Any, rows: Sequence[SweepRow]) -> list[Pair]:
    """Returns measured rows with `first` and with `value` that are equal in every other knob."""
    measured = {row.combination: row for row in rows if row.is_measured}
    partners = [
        (row, measured.get(dataclasses.replace(combination, **{knob: value})))
        for combination, row in measured.items()
        if getattr(combination, knob) == first
    ]
    return [(row, partner) for row, partner in partners if partner is not None]


def mean_ratio(pairs: Sequence[Pair], model: SpeedModel, level: float = 0.95) -> SpeedRatio:
    """Returns the geometric mean of the ratios b / a over pairs (a, b)."""
    weights: dict[Combination, float] = collections.defaultdict(float)
    for a, b in pairs:
        weights[b.combination] += 1 / len(pairs)
        weights[a.combination] -= 1 / len(pairs)
    return model.contrast(weights, level)
