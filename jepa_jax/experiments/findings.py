"""What the rows of a study show: the best learning rate, or accuracy and time against epochs."""

import dataclasses
import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from jepa_jax.base.selection import SELECTION_KEY, VALIDATION_LOSS
from jepa_jax.base.statistics import PooledNoise
from jepa_jax.experiments.rows import DONE, FINISHED, StudyRow


@dataclasses.dataclass(frozen=True)
class Selection:
    """The figure by which runs are compared: which way is better, and how to write it."""

    key: str
    sign: int  # 1: larger is better
    form: str  # of a value, with what it is
    difference: str  # of two values


ACCURACY = Selection(SELECTION_KEY, 1, "{:.2f} % of held-out train images", "{:+.2f}{} points")
LOSS = Selection(VALIDATION_LOSS, -1, "validation loss {:.5g}", "{:+.4g}{} of validation loss")


def selection_of(rows: Iterable[StudyRow]) -> Selection:
    """Returns what the rows are compared by: the held-out linear probe, or without labels the validation loss."""
    rows = list(rows)
    measured = {one: any(getattr(row, one.key) is not None for row in rows) for one in (ACCURACY, LOSS)}
    return LOSS if measured[LOSS] and not measured[ACCURACY] else ACCURACY


@dataclasses.dataclass(frozen=True)
class Findings:
    facts: dict[str, Any]
    sentences: list[str]


@dataclasses.dataclass(frozen=True)
class RowGroup:
    """The rows that share one value of what a study varies."""

    value: float
    rows: tuple[StudyRow, ...]

    def numbers(self, key: str) -> list[float]:
        """Returns the figures of the runs that finished with one."""
        return [getattr(row, key) for row in self.rows if row.status == FINISHED and getattr(row, key) is not None]

    def unfinished(self) -> int:
        return sum(row.status != FINISHED for row in self.rows)

    def mean(self, key: str) -> float:
        """Returns NaN if no run has finished with a figure."""
        numbers = self.numbers(key)
        return statistics.fmean(numbers) if numbers else math.nan


def group_rows(rows: Iterable[StudyRow], key: str) -> list[RowGroup]:
    rows = list(rows)
    values = sorted({getattr(row, key) for row in rows})
    return [RowGroup(value, tuple(row for row in rows if getattr(row, key) == value)) for value in values]


def seed_noise(groups: Iterable[RowGroup], key: str) -> PooledNoise | None:
    """Returns the noise of a figure between seeds; None with one seed per group."""
    return PooledNoise.of(group.numbers(key) for group in groups)


def find_in_rows(kind: str, rows: Sequence[StudyRow]) -> Findings:
    return {"lr_search": find_best_lr, "epoch_tradeoff": find_tradeoff}[kind](sort_rows(rows))


def sort_rows(rows: Iterable[StudyRow]) -> list[StudyRow]:
    return sorted(rows, key=lambda row: (row.lr or 0, row.epochs, row.seed))


def find_best_lr(rows: Sequence[StudyRow]) -> Findings:
    """Finds the learning rate with the best mean on held-out training elements; see `selection_of`."""
    groups, chosen_by = group_rows(rows, "lr"), selection_of(rows)
    key = chosen_by.key
    measured = [group for group in groups if group.numbers(key)]
    facts: dict[str, Any] = {"best_lr": None, "probe_accuracy": None, "at_edge": None, "within_noise": []}
    facts |= {key: None, **common_facts(rows)}
    if not measured:
        return Findings(facts, ["No run has finished with a held-out accuracy: there is no best learning rate."])
    # A rate at which a seed failed is not recommended if another one held for all seeds.
    best = max(measured, key=lambda group: (not group.unfinished(), chosen_by.sign * group.mean(key)))
    held_out, test, seeds = best.mean(key), best.mean("probe_accuracy"), len(best.numbers(key))
    # A run that was killed or could not start says nothing about its rate.
    tried = [group.value for group in groups if any(row.status in DONE for row in group.rows)]
    facts |= {"best_lr": best.value, key: round(held_out, 4 if chosen_by is ACCURACY else 8), "seeds": seeds}
    facts |= {"probe_accuracy": None if math.isnan(test) else round(test, 4)}
    facts |= {"at_edge": best.value in (tried[0], tried[-1])}
    known = "" if math.isnan(test) else f"; test accuracy {test:.2f} %"
    sentences = [f"Best learning rate: {best.value:g}, {chosen_by.form.format(held_out)} (mean of {seeds}){known}."]
    noise = seed_noise(measured, key)
    if noise is None:
        sentences.append("One seed per rate: the noise is unknown; give --seeds=0,1,2 to see it.")
    else:
        close = [group.value for group in measured if group is not best and within_noise(best, group, key, noise)]
        facts |= {"within_noise": close, **noise_facts(noise)}
        named = ", ".join(f"{value:g}" for value in close) or "no other rate"
        sentences.append(f"Within noise of it (95 %, t with {noise.freedom} degrees of freedom): {named}.")
    if facts["at_edge"]:
        side = "smallest" if best.value == tried[0] else "largest"
        sentences.append(f"It is the {side} rate tried: the best may lie beyond; widen --lrs.")
    partly = [(group, group.unfinished()) for group in groups]
    sentences += [f"{group.value:g}: {n} of {len(group.rows)} runs did not finish." for group, n in partly if n]
    return Findings(facts, sentences)


def common_facts(rows: Sequence[StudyRow]) -> dict[str, Any]:
    finished = sum(row.status == FINISHED for row in rows)
    return {"chosen_by": selection_of(rows).key, "runs": len(rows), "finished": finished}


def noise_facts(noise: PooledNoise) -> dict[str, Any]:
    return {"seed_std": float(f"{noise.std:.4g}"), "degrees_of_freedom": noise.freedom}


def within_noise(best: RowGroup, other: RowGroup, key: str, noise: PooledNoise) -> bool:
    """Returns whether the 95 % interval of the difference of two means contains zero."""
    half_width = noise.half_width(*(len(group.numbers(key)) for group in (best, other)))
    return abs(best.mean(key) - other.mean(key)) <= half_width


def find_tradeoff(rows: Sequence[StudyRow]) -> Findings:
    """Compares quality and time of different numbers of epochs, and says whether the times can be trusted."""
    chosen_by = selection_of(rows)
    key = chosen_by.key
    groups = [group for group in group_rows(rows, "epochs") if group.numbers(key)]
    noise = seed_noise(groups, key)
    flagged = odd_times(rows)
    compared = (key, *(["probe_accuracy"] if chosen_by is ACCURACY else []), "wall_seconds")
    points = [
        {"epochs": group.value, **{one: group.mean(one) if group.numbers(one) else None for one in compared}}
        for group in groups
    ]
    facts = {"points": points, "flagged": list(flagged), "time_grows": True}
    facts |= common_facts(rows) | (noise_facts(noise) if noise else {})
    sentences = [f"{name}: {reason}." for name, reason in flagged.items()]
    for before, after in itertools.pairwise(groups):
        gain, extra = (after.mean(one) - before.mean(one) for one in (key, "wall_seconds"))
        counts = (len(group.numbers(key)) for group in (before, after))
        spread = f" ± {noise.half_width(*counts):.3g}" if noise else ""
        gained = chosen_by.difference.format(gain, spread)
        text = f"{before.value} to {after.value} epochs: {gained} for {extra:+.0f} s"
        if extra <= 0:
            facts["time_grows"] = False
            text += "; more epochs cannot take less time: do not trust these times"
        sentences.append(text + ".")
    if len(groups) > 1 and chosen_by is ACCURACY:
        sentences.append("Points are of the linear probe on held-out train images; test accuracies are in the table.")
    if noise:
        sentences.append(f"Standard deviation between seeds: {noise.std:.3g}, {noise.freedom} degrees of freedom.")
    return Findings(facts, sentences or ["Too few runs have finished to compare."])


def odd_times(rows: Iterable[StudyRow]) -> dict[str, str]:
    """Returns finished runs whose time per epoch is off the median of all by more than a factor of 2, and how far."""
    rates = {row.name: row.wall_seconds / row.epochs for row in rows if row.status == FINISHED and row.wall_seconds}
    median = statistics.median(rates.values()) if rates else 0.0
    return {
        name: f"{rate:.3g} s per epoch, the median is {median:.3g}"
        for name, rate in rates.items()
        if not median / 2 <= rate <= 2 * median
    }
