"""The results of a study for people: a Markdown table, a page of charts and a plot."""

import io
import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from jepa_jax.base.files import write_atomically
from jepa_jax.reports import html
from jepa_jax.reports.charts import Series, line_chart
from jepa_jax.studies.findings import Findings, group_rows, sort_rows
from jepa_jax.studies.rows import StudyRow
from jepa_jax.studies.study import Study

COLUMNS = {
    "lr": "lr", "epochs": "epochs", "seed": "seed", "status": "status", "probe_accuracy": "probe %",
    "untrained_probe_accuracy": "untrained %", "knn_accuracy": "k-NN %", "final_loss": "loss", "wall_seconds": "time s",
    "cpu_seconds": "CPU s", "steps": "steps", "reason": "reason",
}  # fmt: skip
DECIMALS = {"wall_seconds": 1, "cpu_seconds": 1} | dict.fromkeys(
    ("probe_accuracy", "untrained_probe_accuracy", "knn_accuracy"), 2
)
# What a kind of study plots: the field on the x axis, whether that axis is logarithmic, and (title, field, unit) per
# chart.
CHARTS = {
    "lr_search": ("lr", True, (("Linear probe", "probe_accuracy", "%"), ("Final loss", "final_loss", ""))),
    "epoch_tradeoff": ("epochs", False, (("Linear probe", "probe_accuracy", "%"), ("Time", "wall_seconds", "s"))),
}


def write_tables(study: Study, rows: Iterable[StudyRow], findings: Findings) -> None:
    """Writes results.md and study.html."""
    rows = sort_rows(rows)
    write_atomically(study.output_dir / "results.md", markdown(study, rows, findings))
    write_atomically(study.output_dir / "study.html", page(study, rows, findings))


def table_cells(rows: Sequence[StudyRow]) -> tuple[list[str], list[list[str]]]:
    """Returns the header and the cells as text; columns that no row fills are left out."""
    keys = [key for key in COLUMNS if any(getattr(row, key) not in (None, "") for row in rows)]

    def text(key: str, value: Any) -> str:
        if value is None or isinstance(value, str):
            return value or ""
        return f"{value:.{DECIMALS[key]}f}" if key in DECIMALS else f"{value:.6g}"

    return [COLUMNS[key] for key in keys], [[text(key, getattr(row, key)) for key in keys] for row in rows]


def markdown(study: Study, rows: Sequence[StudyRow], findings: Findings) -> str:
    header, cells = table_cells(sort_rows(rows))
    lines = [header, ["---"] * len(header), *cells]
    table = "\n".join(
        "| " + " | ".join(c.replace("|", "\\|").replace("\n", " ") for c in line) + " |" for line in lines
    )
    facts = " ".join([study.config, *study.overrides])
    return f"# {study.kind}: `{facts}`\n\n{table}\n\n" + "".join(f"- {text}\n" for text in findings.sentences)


def page(study: Study, rows: Sequence[StudyRow], findings: Findings) -> str:
    header, cells = table_cells(rows)
    best_lr = findings.facts.get("best_lr")
    best = [i for i, row in enumerate(rows) if best_lr is not None and row.lr == best_lr]
    words = "".join(f"<p>{html.escape(text)}</p>" for text in findings.sentences)
    sections = [
        html.Section("Findings", html.card("", words)),
        html.Section("Charts", html.grid(chart_cards(study.kind, rows))),
        html.Section("Runs", html.card("", html.table(cells, header, best), "The log of a run is <run>/log.txt.")),
    ]
    facts = html.escape(" ".join([study.config, *study.overrides]))
    return html.page(study.kind, f"<h1>{html.escape(study.kind)}</h1><p class=sub>{facts}</p>", sections)


def chart_cards(kind: str, rows: Sequence[StudyRow]) -> list[str]:
    """Returns a chart per figure: the mean over seeds, and each seed if there are several."""
    x_key, x_log, charts = CHARTS[kind]
    groups = group_rows(rows, x_key)
    has_seeds = len({row.seed for row in rows}) > 1
    cards = []
    for title, key, unit in charts:
        means = [(group.value, mean) for group in groups if math.isfinite(mean := group.mean(key))]
        series = [Series("mean" if has_seeds else title, *_columns(means), "both")]
        if has_seeds:
            each = [(group.value, number) for group in groups for number in group.numbers(key)]
            series.append(Series("each seed", *_columns(each), "dots"))
        levels = []
        untrained = [number for group in groups for number in group.numbers("untrained_probe_accuracy")]
        if untrained and key == "probe_accuracy":
            mean = statistics.fmean(untrained)
            levels = [(f"untrained {mean:.1f} %", mean)]
        cards.append(line_chart(title, series, x_label=x_key, y_label=unit, x_log=x_log, levels=levels))
    return cards


def write_plot(study: Study, rows: Iterable[StudyRow]) -> None:
    """Writes results.png, the same charts for a document."""
    from matplotlib.figure import Figure

    x_key, x_log, charts = CHARTS[study.kind]
    groups = group_rows(rows, x_key)
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    for axes, (title, key, unit) in zip(figure.subplots(1, len(charts)), charts, strict=True):
        means = [(group.value, mean) for group in groups if math.isfinite(mean := group.mean(key))]
        axes.plot(*_columns(means), "-", color="#2456c8")
        each = [(group.value, number) for group in groups for number in group.numbers(key)]
        axes.plot(*_columns(each), "o", color="#2456c8", alpha=0.7)
        axes.set(title=title, xlabel=x_key, ylabel=unit, xscale="log" if x_log else "linear")
        axes.set_xticks([group.value for group in groups], [f"{group.value:g}" for group in groups])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=140)
    write_atomically(study.output_dir / "results.png", content.getvalue())


def _columns(pairs: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in pairs], [y for _, y in pairs]
