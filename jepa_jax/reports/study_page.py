"""The results of a study: a Markdown table, a page of charts and a plot."""

import math
import statistics
from collections.abc import Iterable, Sequence

from jepa_jax.base.files import write_atomically
from jepa_jax.base.selection import SELECTION_KEY
from jepa_jax.experiments.findings import Findings, Group, group_rows, seed_noise, sort_rows
from jepa_jax.experiments.rows import StudyRow
from jepa_jax.experiments.study import Study
from jepa_jax.reports.charts import Series, line_chart
from jepa_jax.reports.figures import PALETTE, new_figure, save_figure
from jepa_jax.reports.page import Page, PageSection, write_page
from jepa_jax.reports.parts import Card, Table, card_grid
from jepa_jax.reports.tables import markdown_table

# Field of a row -> heading of its column, format of its numbers.
COLUMNS = {
    "lr": ("lr", ".6g"), "epochs": ("epochs", ".6g"), "seed": ("seed", "d"), "status": ("status", ""),
    SELECTION_KEY: ("held-out %", ".2f"), f"untrained_{SELECTION_KEY}": ("untrained held-out %", ".2f"),
    "probe_accuracy": ("test %", ".2f"), "untrained_probe_accuracy": ("untrained test %", ".2f"),
    "knn_accuracy": ("k-NN test %", ".2f"), "final_loss": ("loss", ".6g"),
    "wall_seconds": ("time s", ".1f"), "cpu_seconds": ("CPU s", ".1f"), "steps": ("steps", "d"),
    "reason": ("reason", ""),
}  # fmt: skip
# Kind of study -> field on the x axis, whether that axis is logarithmic, and (title, field, unit) of each chart.
NOTE = "Nothing is chosen by the test columns. The log of a run is <run>/log.txt."
PROBE = ("Linear probe, held-out train images", SELECTION_KEY, "%")
CHARTS = {
    "lr_search": ("lr", True, (PROBE, ("Final loss", "final_loss", ""))),
    "epoch_tradeoff": ("epochs", False, (PROBE, ("Time", "wall_seconds", "s"))),
}


def write_tables(study: Study, rows: Iterable[StudyRow], findings: Findings) -> None:
    """Writes results.md and study.html."""
    rows = sort_rows(rows)
    write_atomically(study.output_dir / "results.md", study_markdown(study, rows, findings))
    write_page(study.output_dir / "study.html", study_page(study, rows, findings))


def study_table(rows: Sequence[StudyRow]) -> tuple[list[str], list[list[str]]]:
    """Returns the header and the cells as text; columns that no row fills are left out."""
    values = {key: [getattr(row, key) for row in rows] for key in COLUMNS}
    filled = [key for key in COLUMNS if any(value not in (None, "") for value in values[key])]
    columns = [["" if value is None else format(value, COLUMNS[key][1]) for value in values[key]] for key in filled]
    return [COLUMNS[key][0] for key in filled], [list(cells) for cells in zip(*columns, strict=True)]


def study_markdown(study: Study, rows: Sequence[StudyRow], findings: Findings) -> str:
    """Returns the table of all runs and the findings."""
    table = markdown_table(*study_table(sort_rows(rows)))
    facts = " ".join([study.config, *study.overrides])
    return f"# {study.kind}: `{facts}`\n\n{table}\n" + "".join(f"- {text}\n" for text in findings.sentences)


def study_page(study: Study, rows: Sequence[StudyRow], findings: Findings) -> Page:
    """Returns the page of a study."""
    header, cells = study_table(rows)
    best_lr = findings.facts.get("best_lr")
    best = [i for i, row in enumerate(rows) if best_lr is not None and row.lr == best_lr]
    return Page(
        heading=study.kind,
        subtitle=" ".join([study.config, *study.overrides]),
        sections=[
            PageSection("Findings", [Card("", findings.sentences)]),
            PageSection("Charts", [card_grid(study_charts(study.kind, rows))]),
            PageSection("Runs", [Card("", [Table(cells, header, best)], NOTE)]),
        ],
    )


def study_charts(kind: str, rows: Sequence[StudyRow]) -> list[Card]:
    """Returns one chart per figure: the mean over seeds and, if there are several, its interval and each seed."""
    x_key, x_log, charts = CHARTS[kind]
    groups = group_rows(rows, x_key)
    ticks = [group.value for group in groups]
    untrained = [number for group in groups for number in group.numbers(f"untrained_{SELECTION_KEY}")]
    cards = []
    for title, key, unit in charts:
        x, y, half_widths = means(groups, key)
        ends = zip(y, half_widths, strict=False)
        intervals = [None if math.isnan(mean) else (mean - half, mean + half) for mean, half in ends]
        series = [Series(title, x, y, "both", intervals)]
        if len({row.seed for row in rows}) > 1:
            name = "mean, 95 % interval" if intervals else "mean"
            series = [series[0]._replace(name=name), Series("each seed", *points(groups, key), "dots")]
        floor = statistics.fmean(untrained) if untrained and key == SELECTION_KEY else None
        levels = [] if floor is None else [(f"untrained {floor:.1f} %", floor)]
        cards.append(line_chart(title, series, x_label=x_key, y_label=unit, x_log=x_log, x_ticks=ticks, levels=levels))
    return cards


def means(groups: Sequence[Group], key: str) -> tuple[list[float], list[float], list[float]]:
    """Returns what varies, the mean of a figure at each value, and half the width of its 95 % interval.

    NaN where no run has the figure. The noise between seeds is pooled over all groups, which accuracies allow, but not
    losses and times: those have no widths, nor has a study with one seed.
    """
    counts = [len(group.numbers(key)) for group in groups]
    noise = seed_noise(groups, key) if key == SELECTION_KEY else None
    half_widths = [] if noise is None else [noise.half_width(count) if count else math.nan for count in counts]
    return [group.value for group in groups], [group.mean(key) for group in groups], half_widths


def points(groups: Sequence[Group], key: str) -> tuple[list[float], list[float]]:
    """Returns the values of what varies, and a figure, of each run."""
    known = [(group.value, number) for group in groups for number in group.numbers(key)]
    return [x for x, _ in known], [y for _, y in known]


def write_plot(study: Study, rows: Iterable[StudyRow]) -> None:
    """Writes results.png, the same charts for a document."""
    x_key, x_log, charts = CHARTS[study.kind]
    groups = group_rows(rows, x_key)
    figure, panels = new_figure((10, 3.6), columns=len(charts))
    for axes, (title, key, unit) in zip(panels, charts, strict=True):
        x, y, half_widths = means(groups, key)
        axes.errorbar(x, y, half_widths or None, color=PALETTE[0], capsize=4)
        axes.plot(*points(groups, key), "o", color=PALETTE[0], alpha=0.7)
        axes.set(title=title, xlabel=x_key, ylabel=unit, xscale="log" if x_log else "linear")
        axes.set_xticks([group.value for group in groups], [f"{group.value:g}" for group in groups])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    save_figure(figure, study.output_dir / "results.png")
