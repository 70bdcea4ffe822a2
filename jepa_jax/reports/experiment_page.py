"""The results of sweeps, searches and studies: pages, Markdown tables and figures."""

import functools
import math
import operator
import pathlib
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jepa_jax.base.files import write_atomically
from jepa_jax.base.selection import SELECTION_KEY, VALIDATION_LOSS
from jepa_jax.base.text import GIB, gib, number, percent, short
from jepa_jax.experiments.engine import Document
from jepa_jax.experiments.findings import (
    ACCURACY,
    Findings,
    RowGroup,
    group_rows,
    seed_noise,
    selection_of,
    sort_rows,
)
from jepa_jax.experiments.recommendation import BY_CONSTRUCTION, EFFECT, NOT_MEASURABLE
from jepa_jax.experiments.rows import StudyRow
from jepa_jax.experiments.settings import KNOBS
from jepa_jax.experiments.study import Study
from jepa_jax.reports import parts
from jepa_jax.reports.charts import Series, line_chart
from jepa_jax.reports.page import write_figure, write_page
from jepa_jax.reports.parts import Card, Cell, KeyFigure, Page, Section
from jepa_jax.reports.tables import Column, cells_markdown, cells_table, table_cells

JsonRow = Mapping[str, Any]  # one of the rows
Measure = Callable[[JsonRow], float | None]

MOST_LINES = 6  # of a chart: those of the fastest rows
STATUS_WORDS = {"ok": "measured", "pending": "not yet measured"}  # others are read as they are written
EFFECT_WORDS = {BY_CONSTRUCTION: "none, by construction", NOT_MEASURABLE: "none that can be measured", EFFECT: "yes"}


def _field(name: str, factor: float = 1.0) -> Measure:
    return lambda row: None if (value := number(row.get(name))) is None else factor * value


def interval_percent(row: JsonRow) -> float | None:
    """Returns half the width of the speed's interval in percent of the speed."""
    interval, speed = row.get("samples_per_sec_ci95"), speed_of(row)
    return 50 * (interval[1] - interval[0]) / speed if interval and speed else None


def memory_gib(row: JsonRow) -> float | None:
    """Returns the peak of the device's allocator, or of the processes where there is none."""
    memory = number(row.get("peak_memory_bytes") or row.get("process_memory_bytes"))
    return None if memory is None else memory / GIB


three_digits = functools.partial(short, digits=3)
speed_of = _field("samples_per_sec")
wait_percent = _field("data_wait_fraction", 100)
SWEEP_COLUMNS = {
    "samples/s": Column(speed_of, short),
    "95 %": Column(interval_percent, "± {:.1f} %".format),
    "step ms": Column(_field("step_time_p50", 1e3), three_digits),
    "p95 ms": Column(_field("step_time_p95", 1e3), three_digits),
    "memory GiB": Column(memory_gib, "{:.2f}".format),
    "data wait %": Column(wait_percent, three_digits),
    "MFU %": Column(_field("mfu", 100), three_digits),
    "GPU %": Column(_field("gpu_sm_util"), three_digits),
    "CPU %": Column(_field("cpu_percent"), three_digits),
    "compile s": Column(_field("compile_seconds"), three_digits),
}


def sweep_cells(rows: Sequence[JsonRow], knobs: Iterable[str]) -> dict[str, list[Cell]]:
    """Returns settings, the figures that any measured row has, and how each row ended."""
    columns = {KNOBS[name].word: Column(operator.methodcaller("get", name)) for name in knobs}
    shown = [{**row["combination"], **(row if row["status"] == "ok" else {})} for row in rows]
    ends = [Cell(text, text, "" if text == STATUS_WORDS["ok"] else "bad") for text in map(status_words, rows)]
    return table_cells(shown, columns | SWEEP_COLUMNS) | {"status": ends}


def status_words(row: JsonRow) -> str:
    """Returns how a row ended and why; for a measured one, what is wrong with it."""
    if row["status"] == "ok" and row.get("finite") is False:
        return "loss not finite"
    if row["status"] == "ok" and row.get("leak"):
        slope = number(row.get("memory_slope_bytes_per_step"))
        return "leaks" + ("" if slope is None else f": memory grows by {slope / 2**20:.2f} MiB per step")
    words = STATUS_WORDS.get(row["status"]) or str(row["status"]).replace("_", " ")
    return f"{words}: {row['reason']}" if row["status"] != "ok" and row.get("reason") else words


def fastest_first(rows: Iterable[JsonRow]) -> list[JsonRow]:
    return sorted(rows, key=lambda row: -(speed_of(row) or 0.0))


def sweep_markdown(rows: Sequence[JsonRow]) -> str:
    return cells_markdown(sweep_cells(fastest_first(rows), KNOBS))


def write_sweep(document: Document, output: pathlib.Path) -> str:
    """Writes the page and the table of a sweep beside its results (.html, .md); returns the table."""
    write_page(output.with_suffix(".html"), sweep_page(document))
    table = sweep_markdown(document["rows"])
    write_atomically(output.with_suffix(".md"), table)
    return table


def sweep_page(document: Document) -> Page:
    """Returns the page of a sweep; one that is still running has a page too."""
    header, rows, conclusion = document["header"], document["rows"], document.get("conclusion") or {}
    chosen = conclusion.get("best")
    best = next((row for row in rows if chosen and dict(row["combination"]) == dict(chosen)), None)
    count = sum(row["status"] == "ok" for row in rows)
    machine = header.get("hardware") or {}
    cores = f"{machine['cores']} cores" if machine.get("cores") else None
    kind = "Tuning" if header.get("kind") == "tune" else "Throughput sweep"
    about_knobs = {knob["text"] for knob in conclusion.get("knobs") or ()}  # the table of knobs says the same
    sentences = [text for text in conclusion.get("text") or () if text not in about_knobs]
    first, *others = sentences or ["Nothing was concluded yet."]
    choice = Card("", [parts.Text(first, "lead"), *(parts.Text(sentence, "sub") for sentence in others)])
    return Page(
        heading=f"{kind} of {header.get('config_name') or 'config'}",
        badge=f"{count} of {len(rows)} measured",
        badge_style="good" if count == len(rows) else "warn" if count else "bad",
        subtitle=" · ".join(filter(None, (machine.get("gpu_name"), machine.get("cpu"), cores, header.get("created")))),
        sections=[
            sweep_headline(rows, best, conclusion),
            Section("The choice", [choice]),
            Section("Charts", [parts.card_grid(sweep_charts(rows, best, header))]),
            knob_section(conclusion),
            combination_section(rows, best),
            Section("How it was measured", [provenance(header)]),
        ],
    )


def sweep_headline(rows: Sequence[JsonRow], best: JsonRow | None, conclusion: Mapping[str, Any]) -> Section:
    """Returns the most important figures; an interval of the gain that contains 1 shows no gain."""
    if best is None:
        return parts.absent_section("", "No combination was measured.")
    leader = conclusion.get("not_shown")
    gain = leader or conclusion.get("gain") or {}
    gain_text, gain_note = "–", "the config as given is not slower, or was not measured"
    if gain.get("ratio"):
        ends = gain.get("interval")
        interval = f"{ends[0]:.2f} to {ends[1]:.2f}" if ends else "measured once: no interval"
        gain_text, gain_note = f"{gain['ratio']:.2f} x", f"{interval}, over the config as given"
        if leader:
            gain_text = "none shown"
            gain_note = f"keep the config; the fastest other: {gain['ratio']:.2f} ({interval}) x"
    spread, memory = interval_percent(best), memory_gib(best)
    memory_text = "–" if memory is None else f"{memory:.2f} GiB"
    failed = sum(row["status"] not in ("ok", "pending", "skipped") for row in rows)
    figures = [
        KeyFigure("Samples/s", short(speed_of(best)), "" if spread is None else f"± {spread:.1f} %", main=True),
        KeyFigure("Gain", gain_text, gain_note),
        KeyFigure("Peak memory", memory_text, "device" if best.get("peak_memory_bytes") else "process"),
        KeyFigure("Waiting for data", percent(wait_percent(best)), "of a step"),
        KeyFigure("Noise of one repeat", percent(conclusion.get("noise_percent")), "pooled over all rows"),
        KeyFigure("Failed", str(failed), f"of {len(rows)} combinations"),
    ]
    return Section("", [parts.KeyFigures(figures)])


def sweep_series(
    rows: Iterable[JsonRow], name: str, x: str, y: Measure, best: Measure = speed_of, intervals: bool = False
) -> list[Series]:
    """Returns one line per name, which is formatted with the settings of a row.

    Where several rows have one x, the one with the largest `best` is shown.
    """
    chosen: dict[str, dict[float, JsonRow]] = {}
    for row in sorted(rows, key=lambda row: best(row) or 0.0):
        if y(row) is not None:
            label = name.format(**row["combination"])
            chosen[label] = {**chosen.pop(label, {}), row["combination"][x]: row}  # the largest lines are last
    lines = []
    for label in sorted(list(chosen)[-MOST_LINES:]):
        points = [chosen[label][place] for place in sorted(chosen[label])]
        ends = [row.get("samples_per_sec_ci95") for row in points] if intervals else []
        lines.append(Series(label, sorted(chosen[label]), [y(row) or 0.0 for row in points], intervals=ends))
    return lines


def sweep_charts(rows: Sequence[JsonRow], best: JsonRow | None, header: Mapping[str, Any]) -> list[Card]:
    """Returns speed and memory against batch size, and the wait for data against workers.

    The wait is that of rows which use the loader, where possible with the other settings of the choice.
    """
    rows = [row for row in rows if row["status"] == "ok" and speed_of(row)]
    pools = [row["device_limit_bytes"] for row in rows if row.get("device_limit_bytes")]
    limit = max(pools, default=None) or number(header.get("memory_limit_bytes"))  # JAX may take a part of a card
    where = "device" if any(row.get("peak_memory_bytes") for row in rows) else "process"
    loaded = [row for row in rows if row["combination"]["pipeline"] != "device"]
    others = ("precision", "remat", "grad_accum_steps")
    like = [row for row in loaded if best and all(row["combination"][k] == best["combination"][k] for k in others)]
    waits = sweep_series(like or loaded, "batch {batch_size:,}", "num_workers", wait_percent)
    sizes = sorted({row["combination"]["batch_size"] for row in rows})
    options: dict[str, Any] = {"x_log": True, "x_ticks": sizes, "from_zero": True}
    programs = "{precision}, remat {remat}" if any(row["combination"]["remat"] for row in rows) else "{precision}"
    return [
        line_chart(
            "Throughput against batch size",
            sweep_series(rows, "{precision}", "batch_size", speed_of, intervals=True),
            x_label="batch size (the fastest of the other settings at each)",
            y_label="samples per second, 95 % interval",
            wide=True,
            **options,
        ),
        line_chart(
            "Memory against batch size",
            sweep_series(rows, programs, "batch_size", memory_gib, memory_gib),
            x_label="batch size",
            y_label=f"GiB, peak of the {where}",
            levels=[(f"limit {limit / GIB:.1f} GiB", limit / GIB)] if limit else [],
            **options,
        ),
        line_chart(
            "Data wait against workers",
            sorted(waits, key=lambda line: int(line.name.split()[1].replace(",", ""))),
            x_label="workers",
            y_label="% of a step",
            x_ticks=sorted({row["combination"]["num_workers"] for row in loaded}),
            from_zero=True,
        ),
    ]


def knob_section(conclusion: Mapping[str, Any]) -> Section:
    title = "What each setting does"
    rows = []
    for knob in conclusion.get("knobs") or ():
        for entry in knob["comparisons"]:
            interval, ratio = entry.get("interval"), entry.get("ratio")
            rows.append([
                KNOBS[knob["knob"]].word,
                f"{entry['from']} → {entry['to']}",
                "–" if ratio is None else f"{ratio:.3f} x",
                f"{interval[0]:.3f} to {interval[1]:.3f}" if interval else "–",
                f"{entry['smallest']:.2f} to {entry['largest']:.2f}" if entry.get("smallest") else "–",
                EFFECT_WORDS.get(entry["effect"], entry["effect"]),
            ])  # fmt: skip
    if not rows:
        return parts.absent_section(title, "Only one value of each setting was measured.")
    note = "Speed at the second value over speed at the first, between combinations that are otherwise equal."
    header = ["setting", "from → to", "ratio", "95 % interval", "smallest and largest pair", "effect"]
    return Section(title, [Card("", [parts.Table(rows, header)], note)])


def combination_section(rows: Sequence[JsonRow], best: JsonRow | None) -> Section:
    """Returns every row, the fastest first, in a table that can be sorted; equal settings are named once below it."""
    rows = fastest_first(rows)
    values = {knob: {row["combination"].get(knob) for row in rows} for knob in KNOBS}
    columns = sweep_cells(rows, [knob for knob, found in values.items() if len(found) > 1])
    table = cells_table(columns, [i for i, row in enumerate(rows) if row is best])
    same = {knob: found.pop() for knob, found in values.items() if len(found) == 1}
    equal = ", ".join(f"{KNOBS[knob].word} {value}" for knob, value in same.items() if value not in (None, ""))
    note = (f"The same in all rows: {equal}. " if equal else "") + "Click a heading to sort. Blue: the choice."
    note += " Ratios above compare trials of the same round, so they may differ from the quotient of two rows."
    return Section("All combinations", [Card("", [table], note)])


def provenance(header: Mapping[str, Any]) -> parts.Grid:
    measurement = {
        "command": header.get("command"),
        "measured batches": header.get("max_batches"),
        "warm-up batches": header.get("warmup_batches"),
        "repeats": header.get("repeats"),
        "config": f"{header.get('config_name')} ({header.get('config_hash')})",
        "begun": header.get("created"),
    }
    cards = []
    for title, part in {
        "Measurement": measurement,
        "Machine": header.get("hardware"),
        "Versions": header.get("versions"),
    }.items():
        known = {key: value for key, value in (part or {}).items() if value is not None}
        texts = [
            (key.removesuffix("_bytes").replace("_", " "), gib(value) if key.endswith("_bytes") else value)
            for key, value in known.items()
        ]
        cards += [Card(title, [parts.pairs(texts)], wide=part is measurement)] if part else []
    return parts.card_grid(cards)


def _run_column(field: str, form: str) -> Column:
    return Column(operator.attrgetter(field), lambda value: format(value, form))


STUDY_COLUMNS = {
    "lr": _run_column("lr", ".6g"),
    "epochs": _run_column("epochs", ".6g"),
    "seed": _run_column("seed", "d"),
    "status": _run_column("status", ""),
    "held-out %": _run_column(SELECTION_KEY, ".2f"),
    "untrained held-out %": _run_column(f"untrained_{SELECTION_KEY}", ".2f"),
    "test %": _run_column("probe_accuracy", ".2f"),
    "untrained test %": _run_column("untrained_probe_accuracy", ".2f"),
    "k-NN test %": _run_column("knn_accuracy", ".2f"),
    "validation loss": _run_column(VALIDATION_LOSS, ".6g"),
    "loss": _run_column("final_loss", ".6g"),
    "time s": _run_column("wall_seconds", ".1f"),
    "CPU s": _run_column("cpu_seconds", ".1f"),
    "steps": _run_column("steps", "d"),
    "reason": _run_column("reason", ""),
}
STUDY_NOTE = "Nothing is chosen by the test columns. The log of a run is <run>/log.txt."
PROBE = ("Linear probe, held-out train images", SELECTION_KEY, "%")
HELD_OUT = ("Validation loss", VALIDATION_LOSS, "")
# Kind of study -> field on the x axis, whether that axis is logarithmic, and (title, field, unit) of its second chart.
STUDY_CHARTS = {
    "lr_search": ("lr", True, ("Final loss", "final_loss", "")),
    "epoch_tradeoff": ("epochs", False, ("Time", "wall_seconds", "s")),
}


def write_study(study: Study, rows: Iterable[StudyRow], findings: Findings) -> None:
    """Writes results.md, study.html and results.svg."""
    rows = sort_rows(rows)
    write_atomically(study.output_dir / "results.md", study_markdown(study, rows, findings))
    write_page(study.output_dir / "study.html", study_page(study, rows, findings))
    write_figure(study.output_dir / "results.svg", study_charts(study.kind, rows))


def study_markdown(study: Study, rows: Sequence[StudyRow], findings: Findings) -> str:
    table = cells_markdown(table_cells(sort_rows(rows), STUDY_COLUMNS))
    facts = " ".join([study.config, *study.overrides])
    return f"# {study.kind}: `{facts}`\n\n{table}\n" + "".join(f"- {text}\n" for text in findings.sentences)


def study_page(study: Study, rows: Sequence[StudyRow], findings: Findings) -> Page:
    cells = table_cells(rows, STUDY_COLUMNS)
    best_lr = findings.facts.get("best_lr")
    best = [i for i, row in enumerate(rows) if best_lr is not None and row.lr == best_lr]
    return Page(
        heading=study.kind,
        subtitle=" ".join([study.config, *study.overrides]),
        sections=[
            Section("Findings", [Card("", findings.sentences)]),
            Section("Charts", [parts.card_grid(study_charts(study.kind, rows))]),
            Section("Runs", [Card("", [cells_table(cells, best)], STUDY_NOTE)]),
        ],
    )


def study_charts(kind: str, rows: Sequence[StudyRow]) -> list[Card]:
    """Returns one chart per figure: the mean over seeds and, if there are several, its interval and each seed."""
    x_key, x_log, second = STUDY_CHARTS[kind]
    groups, charts = group_rows(rows, x_key), (PROBE if selection_of(rows) is ACCURACY else HELD_OUT, second)
    ticks = [group.value for group in groups]
    untrained = [number for group in groups for number in group.numbers(f"untrained_{SELECTION_KEY}")]
    cards = []
    for title, key, unit in charts:
        means, intervals = means_and_intervals(groups, key)
        series = [Series(title, ticks, means, "both", intervals)]
        if len({row.seed for row in rows}) > 1:
            known = [(group.value, number) for group in groups for number in group.numbers(key)]
            seeds = Series("each seed", [x for x, _ in known], [y for _, y in known], "dots")
            series = [series[0]._replace(name="mean, 95 % interval" if intervals else "mean"), seeds]
        floor = statistics.fmean(untrained) if untrained and key == SELECTION_KEY else None
        levels = [] if floor is None else [(f"untrained {floor:.1f} %", floor)]
        cards.append(line_chart(title, series, x_label=x_key, y_label=unit, x_log=x_log, x_ticks=ticks, levels=levels))
    return cards


def means_and_intervals(groups: Sequence[RowGroup], key: str) -> tuple[list[float], list[tuple[float, float] | None]]:
    """Returns the mean of a figure in each group, NaN where no run has it, and its 95 % interval.

    The noise between seeds is pooled over all groups, which accuracies allow, but not losses and times: those have no
    intervals, nor has a study with one seed.
    """
    means = [group.mean(key) for group in groups]
    noise = seed_noise(groups, key) if key == SELECTION_KEY else None
    if noise is None:
        return means, []
    halves = [noise.half_width(len(group.numbers(key)) or 1) for group in groups]
    return means, [
        None if math.isnan(mean) else (mean - half, mean + half) for mean, half in zip(means, halves, strict=True)
    ]
