"""What a study found: conclusions in words and numbers, a Markdown table, a page of charts and a plot."""

import dataclasses
import math
import os
import pathlib
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from jepa_jax.base.files import write_atomically
from jepa_jax.reports.charts import Series, line_chart
from jepa_jax.reports.page import Page, PageSection, write_page
from jepa_jax.reports.parts import Card, Table, card_grid
from jepa_jax.studies.study import DONE, FINISHED, Row, Study, finite


@dataclasses.dataclass(frozen=True)
class Group:
    """The rows of one value of what varies."""

    value: float
    rows: tuple[Row, ...]

    def numbers(self, key: str) -> list[float]:
        return [row[key] for row in self.rows if row["status"] == FINISHED and row.get(key) is not None]

    def failures(self, key: str) -> int:
        return len(self.rows) - len(self.numbers(key))

    def mean(self, key: str) -> float:
        """NaN if no run has finished with it."""
        numbers = self.numbers(key)
        return statistics.fmean(numbers) if numbers else math.nan


def group_rows(rows: Iterable[Row], key: str) -> list[Group]:
    """Groups in the order of their value."""
    rows = list(rows)
    return [Group(v, tuple(r for r in rows if r[key] == v)) for v in sorted({row[key] for row in rows})]


def seed_variance(groups: Iterable[Group], key: str) -> float | None:
    """Variance between seeds, pooled over the groups: sum (n-1) s^2 / sum (n-1); None with one seed each."""
    several = [numbers for group in groups if len(numbers := group.numbers(key)) > 1]
    freedom = sum(len(numbers) - 1 for numbers in several)
    return sum((len(n) - 1) * statistics.variance(n) for n in several) / freedom if freedom else None


def count_rows(rows: Sequence[Row]) -> dict[str, int]:
    return {"runs": len(rows), "finished": sum(row["status"] == FINISHED for row in rows)}


def conclude_lr(rows: Sequence[Row]) -> tuple[dict[str, Any], list[str]]:
    """The best learning rate by mean probe accuracy, as a JSON object and in words."""
    groups = group_rows(rows, "lr")
    measured = [group for group in groups if group.numbers("probe_accuracy")]
    result: dict[str, Any] = {
        "best_lr": None,
        "probe_accuracy": None,
        "at_edge": None,
        "within_noise": [],
    } | count_rows(rows)
    if not measured:
        return result, ["No run has finished with an accuracy: there is no best learning rate."]
    # A rate at which a seed failed is no recommendation while another held for all.
    best = max(measured, key=lambda g: (not g.failures("probe_accuracy"), g.mean("probe_accuracy")))
    accuracy, seeds = best.mean("probe_accuracy"), len(best.numbers("probe_accuracy"))
    # A run that was killed or could not start says nothing about its rate.
    tried = [group.value for group in groups if any(row["status"] in DONE for row in group.rows)]
    at_edge = best.value in (tried[0], tried[-1])
    result |= {"best_lr": best.value, "probe_accuracy": round(accuracy, 4), "at_edge": at_edge, "seeds": seeds}
    words = [f"Best learning rate: {best.value:g}, {accuracy:.2f} % (mean of {seeds})." if seeds > 1 else
             f"Best learning rate: {best.value:g}, {accuracy:.2f} %."]  # fmt: skip
    variance = seed_variance(measured, "probe_accuracy")
    if variance is None:
        words.append("One seed a rate: the noise is unknown; give --seeds=0,1,2 to see it.")
    else:

        def margin(other: Group) -> float:  # two standard errors of the difference of the means
            return 2 * math.sqrt(variance * (1 / seeds + 1 / len(other.numbers("probe_accuracy"))))

        others = [g for g in measured if g is not best and abs(accuracy - g.mean("probe_accuracy")) <= margin(g)]
        result |= {"within_noise": [g.value for g in others], "seed_std": round(math.sqrt(variance), 4)}
        close = ", ".join(f"{g.value:g}" for g in others)
        words.append(
            f"Within noise of it (2 standard errors): {close}." if close else "No other is within noise of it."
        )
    if len(tried) == 1:
        words.append("Only one rate was tried.")
    elif at_edge:
        side = "smallest" if best.value == tried[0] else "largest"
        words.append(f"It is the {side} rate tried: the best may lie beyond; widen --lrs.")
    else:
        words.append("It lies inside the range tried.")
    partly = [(group, group.failures("probe_accuracy")) for group in groups]
    words += [f"{group.value:g}: {n} of {len(group.rows)} runs did not finish." for group, n in partly if n]
    return result, words


def conclude_epochs(rows: Sequence[Row]) -> tuple[dict[str, Any], list[str]]:
    """Accuracy and time against epochs, and whether the times can be trusted."""
    groups = [g for g in group_rows(rows, "epochs") if g.numbers("probe_accuracy")]
    points: list[dict[str, Any]] = [
        {"epochs": g.value, "probe_accuracy": g.mean("probe_accuracy"), "wall_seconds": finite(g.mean("wall_seconds"))}
        for g in groups
    ]
    flagged = odd_times(rows)
    result = {"points": points, "flagged": list(flagged), "time_grows": True} | count_rows(rows)
    words = [f"{name}: {reason}." for name, reason in flagged.items()]
    for before, after in zip(points, points[1:], strict=False):
        gain = after["probe_accuracy"] - before["probe_accuracy"]
        text = f"{before['epochs']} to {after['epochs']} epochs: {gain:+.2f} points"
        if before["wall_seconds"] is not None and after["wall_seconds"] is not None:
            extra = after["wall_seconds"] - before["wall_seconds"]
            text += f" for {extra:+.0f} s"
            if extra <= 0:
                result["time_grows"] = False
                text += "; more epochs cannot take less time: do not trust these times"
        words.append(text + ".")
    variance = seed_variance(groups, "probe_accuracy")
    if variance is not None:
        result["seed_std"] = round(math.sqrt(variance), 4)
        words.append(f"Standard deviation between seeds: {math.sqrt(variance):.2f} points.")
    return result, words or ["Too few runs have finished to compare."]


def odd_times(rows: Iterable[Row], factor: float = 2.0) -> dict[str, str]:
    """Finished runs whose time an epoch is more than `factor` times off the median of all."""
    rates = {r["name"]: r["wall_seconds"] / r["epochs"] for r in rows if r["status"] == FINISHED and r["wall_seconds"]}
    median = statistics.median(rates.values()) if rates else 0.0
    return {
        name: f"{rate:.3g} s an epoch, the median is {median:.3g}"
        for name, rate in rates.items()
        if rate > factor * median or rate < median / factor
    }


COLUMNS = {
    "lr": "lr", "epochs": "epochs", "seed": "seed", "status": "status", "probe_accuracy": "probe %",
    "untrained_probe_accuracy": "untrained %", "knn_accuracy": "k-NN %", "final_loss": "loss", "wall_seconds": "time s",
    "cpu_seconds": "CPU s", "steps": "steps", "reason": "reason",
}  # fmt: skip
ONE_DECIMAL = {"wall_seconds", "cpu_seconds"}
TWO_DECIMALS = {"probe_accuracy", "untrained_probe_accuracy", "knn_accuracy"}


def table_cells(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Header and cells as text; columns that no row fills are left out."""
    keys = [key for key in COLUMNS if any(row.get(key) not in (None, "") for row in rows)]

    def text(key: str, value: Any) -> str:
        if value is None or isinstance(value, str):
            return value or ""
        decimals = 1 if key in ONE_DECIMAL else 2
        return f"{value:.{decimals}f}" if key in ONE_DECIMAL | TWO_DECIMALS else f"{value:.6g}"

    return [COLUMNS[key] for key in keys], [[text(key, row.get(key)) for key in keys] for row in rows]


def sort_rows(rows: Iterable[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: (row.get("lr") or 0, row["epochs"], row["seed"]))


def markdown(study: Study, rows: Sequence[Row], words: Sequence[str]) -> str:
    header, cells = table_cells(rows)
    lines = [header, ["---"] * len(header), *cells]
    table = "\n".join(
        "| " + " | ".join(c.replace("|", "\\|").replace("\n", " ") for c in line) + " |" for line in lines
    )
    facts = " ".join([study.config, *study.overrides])
    return f"# {study.kind}: `{facts}`\n\n{table}\n\n" + "".join(f"- {word}\n" for word in words)


# What a kind of study plots against what: x, whether x is logarithmic, (title, key of a row, unit) of each chart.
CHARTS = {
    "lr_search": ("lr", True, (("Linear probe", "probe_accuracy", "%"), ("Final loss", "final_loss", ""))),
    "epoch_tradeoff": ("epochs", False, (("Linear probe", "probe_accuracy", "%"), ("Time", "wall_seconds", "s"))),
}
CONCLUSIONS = {"lr_search": conclude_lr, "epoch_tradeoff": conclude_epochs}


def write_results(study: Study, rows: Iterable[Row]) -> tuple[dict[str, Any], str]:
    """results.md and study.html from the rows; returns the conclusion as a JSON object and the Markdown."""
    rows = sort_rows(rows)
    result, words = CONCLUSIONS[study.kind](rows)
    text = markdown(study, rows, words)
    x_key, x_log, charts = CHARTS[study.kind]
    groups = group_rows(rows, x_key)
    cards = []
    for title, key, unit in charts:
        means = [(g.value, mean) for g in groups if math.isfinite(mean := g.mean(key))]
        series = [Series("mean" if study_has_seeds(rows) else title, *_columns(means), "both")]
        if study_has_seeds(rows):
            series.append(
                Series("each seed", *_columns([(g.value, n) for g in groups for n in g.numbers(key)]), "dots")
            )
        untrained = (
            [n for g in groups for n in g.numbers("untrained_probe_accuracy")] if key == "probe_accuracy" else []
        )
        levels = [(f"untrained {statistics.fmean(untrained):.1f} %", statistics.fmean(untrained))] if untrained else []
        cards.append(line_chart(title, series, x_label=x_key, y_label=unit, x_log=x_log, levels=levels))
    header, cells = table_cells(rows)
    best = [i for i, row in enumerate(rows) if result.get("best_lr") is not None and row["lr"] == result["best_lr"]]
    sections = [
        PageSection("Findings", [Card("", words)]),
        PageSection("Charts", [card_grid(cards)]),
        PageSection("Runs", [Card("", [Table(cells, header, best)], "The log of a run is <run>/log.txt.")]),
    ]
    page = Page(study.kind, sections, subtitle=" ".join([study.config, *study.overrides]))
    write_atomically(study.output_dir / "results.md", text)
    write_page(study.output_dir / "study.html", page)
    return result, text


def _columns(pairs: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in pairs], [y for _, y in pairs]


def study_has_seeds(rows: Iterable[Row]) -> bool:
    return len({row["seed"] for row in rows}) > 1


def write_plot(study: Study, rows: Iterable[Row]) -> pathlib.Path:
    """results.png: the same charts for a document."""
    from matplotlib.figure import Figure

    x_key, x_log, charts = CHARTS[study.kind]
    groups = group_rows(rows, x_key)
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    for axes, (title, key, unit) in zip(figure.subplots(1, len(charts)), charts, strict=True):
        axes.plot(
            *_columns([(g.value, mean) for g in groups if math.isfinite(mean := g.mean(key))]), "-", color="#2456c8"
        )
        axes.plot(*_columns([(g.value, n) for g in groups for n in g.numbers(key)]), "o", color="#2456c8", alpha=0.7)
        axes.set(title=title, xlabel=x_key, ylabel=unit, xscale="log" if x_log else "linear")
        axes.set_xticks([g.value for g in groups], [f"{g.value:g}" for g in groups])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    path, temporary = study.output_dir / "results.png", study.output_dir / ".results.png"
    figure.savefig(temporary, format="png", dpi=140)
    os.replace(temporary, path)
    return path
