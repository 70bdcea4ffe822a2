"""What the rows of a study show: the best learning rate, or accuracy and time against epochs."""

import dataclasses
import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from jepa_jax.studies.rows import DONE, FINISHED, StudyRow, finite


@dataclasses.dataclass(frozen=True)
class Findings:
    """What was found, as a JSON object and as sentences."""

    facts: dict[str, Any]
    sentences: list[str]


@dataclasses.dataclass(frozen=True)
class Group:
    """The rows that share one value of what a study varies."""

    value: float
    rows: tuple[StudyRow, ...]

    def numbers(self, key: str) -> list[float]:
        """Returns the figures of the runs that finished with one."""
        return [getattr(row, key) for row in self.rows if row.status == FINISHED and getattr(row, key) is not None]

    def failures(self, key: str) -> int:
        return len(self.rows) - len(self.numbers(key))

    def mean(self, key: str) -> float:
        """Returns NaN if no run has finished with a figure."""
        numbers = self.numbers(key)
        return statistics.fmean(numbers) if numbers else math.nan


def group_rows(rows: Iterable[StudyRow], key: str) -> list[Group]:
    """Groups rows by a field, in the order of its values."""
    rows = list(rows)
    values = sorted({getattr(row, key) for row in rows})
    return [Group(value, tuple(row for row in rows if getattr(row, key) == value)) for value in values]


def seed_variance(groups: Iterable[Group], key: str) -> float | None:
    """Returns the variance between seeds, pooled: sum (n-1) s^2 / sum (n-1); None with one seed per group."""
    several = [numbers for group in groups if len(numbers := group.numbers(key)) > 1]
    freedom = sum(len(numbers) - 1 for numbers in several)
    return sum((len(n) - 1) * statistics.variance(n) for n in several) / freedom if freedom else None


def find(kind: str, rows: Sequence[StudyRow]) -> Findings:
    """Returns the findings of a kind of study: lr_search or epoch_tradeoff."""
    return {"lr_search": find_best_lr, "epoch_tradeoff": find_tradeoff}[kind](sort_rows(rows))


def sort_rows(rows: Iterable[StudyRow]) -> list[StudyRow]:
    return sorted(rows, key=lambda row: (row.lr or 0, row.epochs, row.seed))


def find_best_lr(rows: Sequence[StudyRow]) -> Findings:
    """Finds the learning rate with the best mean probe accuracy."""
    groups = group_rows(rows, "lr")
    measured = [group for group in groups if group.numbers("probe_accuracy")]
    facts: dict[str, Any] = {"best_lr": None, "probe_accuracy": None, "at_edge": None, "within_noise": []}
    facts |= {"runs": len(rows), "finished": sum(row.status == FINISHED for row in rows)}
    if not measured:
        return Findings(facts, ["No run has finished with an accuracy: there is no best learning rate."])
    # A rate at which a seed failed is not recommended if another one held for all seeds.
    best = max(measured, key=lambda g: (not g.failures("probe_accuracy"), g.mean("probe_accuracy")))
    accuracy, seeds = best.mean("probe_accuracy"), len(best.numbers("probe_accuracy"))
    # A run that was killed or could not start says nothing about its rate.
    tried = [group.value for group in groups if any(row.status in DONE for row in group.rows)]
    at_edge = best.value in (tried[0], tried[-1])
    facts |= {"best_lr": best.value, "probe_accuracy": round(accuracy, 4), "at_edge": at_edge, "seeds": seeds}
    mean = f" (mean of {seeds})" if seeds > 1 else ""
    sentences = [f"Best learning rate: {best.value:g}, {accuracy:.2f} %{mean}."]
    variance = seed_variance(measured, "probe_accuracy")
    if variance is None:
        sentences.append("One seed per rate: the noise is unknown; give --seeds=0,1,2 to see it.")
    else:
        close = [group.value for group in measured if group is not best and within_noise(best, group, variance)]
        facts |= {"within_noise": close, "seed_std": round(math.sqrt(variance), 4)}
        named = ", ".join(f"{value:g}" for value in close)
        sentences.append(
            f"Within noise of it (2 standard errors): {named}." if named else "No other rate is within noise of it."
        )
    sentences.append(place_sentence(best.value, tried))
    partly = [(group, group.failures("probe_accuracy")) for group in groups]
    sentences += [f"{group.value:g}: {n} of {len(group.rows)} runs did not finish." for group, n in partly if n]
    return Findings(facts, sentences)


def within_noise(best: Group, other: Group, variance: float) -> bool:
    """Returns whether two mean accuracies differ by at most two standard errors of their difference."""
    counts = [len(group.numbers("probe_accuracy")) for group in (best, other)]
    error = math.sqrt(variance * sum(1 / count for count in counts))
    return abs(best.mean("probe_accuracy") - other.mean("probe_accuracy")) <= 2 * error


def place_sentence(best: float, tried: Sequence[float]) -> str:
    if len(tried) == 1:
        return "Only one rate was tried."
    if best not in (tried[0], tried[-1]):
        return "It lies inside the range tried."
    side = "smallest" if best == tried[0] else "largest"
    return f"It is the {side} rate tried: the best may lie beyond; widen --lrs."


def find_tradeoff(rows: Sequence[StudyRow]) -> Findings:
    """Compares accuracy and time of different numbers of epochs, and says whether the times can be trusted."""
    groups = [group for group in group_rows(rows, "epochs") if group.numbers("probe_accuracy")]
    points: list[dict[str, Any]] = [
        {"epochs": g.value, "probe_accuracy": g.mean("probe_accuracy"), "wall_seconds": finite(g.mean("wall_seconds"))}
        for g in groups
    ]
    flagged = odd_times(rows)
    facts = {"points": points, "flagged": list(flagged), "time_grows": True}
    facts |= {"runs": len(rows), "finished": sum(row.status == FINISHED for row in rows)}
    sentences = [f"{name}: {reason}." for name, reason in flagged.items()]
    for before, after in zip(points, points[1:], strict=False):
        gain = after["probe_accuracy"] - before["probe_accuracy"]
        text = f"{before['epochs']} to {after['epochs']} epochs: {gain:+.2f} points"
        if before["wall_seconds"] is not None and after["wall_seconds"] is not None:
            extra = after["wall_seconds"] - before["wall_seconds"]
            text += f" for {extra:+.0f} s"
            if extra <= 0:
                facts["time_grows"] = False
                text += "; more epochs cannot take less time: do not trust these times"
        sentences.append(text + ".")
    variance = seed_variance(groups, "probe_accuracy")
    if variance is not None:
        facts["seed_std"] = round(math.sqrt(variance), 4)
        sentences.append(f"Standard deviation between seeds: {math.sqrt(variance):.2f} points.")
    return Findings(facts, sentences or ["Too few runs have finished to compare."])


def odd_times(rows: Iterable[StudyRow], factor: float = 2.0) -> dict[str, str]:
    """Returns finished runs whose time per epoch is off the median of all by more than `factor`, with the reason."""
    rates = {row.name: row.wall_seconds / row.epochs for row in rows if row.status == FINISHED and row.wall_seconds}
    median = statistics.median(rates.values()) if rates else 0.0
    return {
        name: f"{rate:.3g} s per epoch, the median is {median:.3g}"
        for name, rate in rates.items()
        if rate > factor * median or rate < median / factor
    }
