"""A sweep for people: one HTML page with the choice in words, pictures and a sortable table; a Markdown table."""

import datetime
import math
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jepa_jax.base.files import write_atomically
from jepa_jax.reports import html
from jepa_jax.reports.charts import Series, line_chart
from jepa_jax.reports.html import Section
from jepa_jax.reports.sweep_table import (
    GIB,
    KNOB_WORDS,
    STATUS_WORDS,
    Row,
    interval_text,
    is_finite,
    markdown_table,
    memory_of,
    memory_text,
    sortable_table,
)
from jepa_jax.tuning.knob_effects import BY_CONSTRUCTION, EFFECT, NOT_MEASURABLE
from jepa_jax.tuning.settings import Combination

__all__ = ["markdown_table", "page", "write_html"]

Document = Mapping[str, Any]
MOST_LINES = 6  # in a picture; of more, the fastest
EFFECT_WORDS = {BY_CONSTRUCTION: "none, by construction", NOT_MEASURABLE: "none that can be measured", EFFECT: "yes"}


def write_html(document: Document, path: str | pathlib.Path) -> None:
    """Writes the page; it is complete without a network."""
    write_atomically(path, page(document))


def page(document: Document) -> str:
    header, rows = document["header"], document["rows"]
    title = "Tuning" if header.get("kind") == "tune" else "Throughput sweep"
    name = header.get("config_name") or "config"
    measured = sum(row["status"] == "ok" for row in rows)
    kind = "good" if measured == len(rows) else "warn" if measured else "bad"
    head = (
        f'<h1>{title} of {html.escape(name)}<span class="pill {kind}">{measured} of {len(rows)} measured</span></h1>'
        f'<p class="sub">{html.escape(" · ".join(_machine_words(header)))}</p>'
    )
    sections = [
        headline(document),
        Section("The choice", choice_card(document)),
        Section("Pictures", html.grid(pictures(document))),
        Section("What each setting does", knob_card(document)),
        Section(
            "All combinations",
            html.card("", sortable_table(rows, best_row(document)), "Click a heading to sort. Blue: the choice."),
        ),
        *failure_sections(rows),
        Section("How it was measured", provenance(header)),
    ]
    written = datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")
    return html.page(f"{title} of {name} · jepa_jax", head, sections, f"Written {written}.")


def _machine_words(header: Mapping[str, Any]) -> list[str]:
    machine = header.get("hardware") or {}
    words = [str(machine[key]) for key in ("gpu_name", "cpu") if machine.get(key)]
    words += [f"{machine['cores']} cores"] if machine.get("cores") else []
    words += [str(header["created"])] if header.get("created") else []
    return words


def headline(document: Document) -> Section:
    """The figures a reader came for."""
    rows, conclusion = document["rows"], document.get("conclusion") or {}
    best = best_row(document)
    if best is None:
        return Section("", html.card("", html.absent("No combination was measured.")))
    gain, interval = conclusion.get("gain") or {}, gain_interval(conclusion)
    wait = html.number(best.get("data_wait_fraction"))
    failed = sum(row["status"] not in ("ok", "pending", "skipped") for row in rows)
    return Section(
        "",
        html.figures(
            [
                ("main", "Images a second", html.short(best["samples_per_sec"]), interval_text(best)[0]),
                ("", "Gain", f"{gain['ratio']:.2f} x" if gain.get("ratio") else "–", interval),
                (
                    "",
                    "Peak memory",
                    f"{memory_text(best)[0]} GiB",
                    "device" if best.get("peak_memory_bytes") else "process",
                ),
                ("", "Waiting for data", "–" if wait is None else f"{100 * wait:.1f} %", "of a step"),
                ("", "Noise of one repeat", html.percent(conclusion.get("noise_percent")), "pooled over all rows"),
                ("", "Failed", str(failed), f"of {len(rows)} combinations"),
            ]
        ),
    )


def gain_interval(conclusion: Mapping[str, Any]) -> str:
    gain = conclusion.get("gain")
    if not gain:
        return "the config as given is not slower, or was not measured"
    ends = gain.get("interval")
    return (f"{ends[0]:.2f} to {ends[1]:.2f}, " if ends else "") + "over the config as given"


def best_row(document: Document) -> Row | None:
    best = (document.get("conclusion") or {}).get("best")
    return next((row for row in document["rows"] if best and dict(row["combination"]) == dict(best)), None)


def choice_card(document: Document) -> str:
    conclusion = document.get("conclusion") or {}
    shown_below = {knob["text"] for knob in conclusion.get("knobs") or ()}
    sentences = [text for text in conclusion.get("text") or () if text not in shown_below]
    sentences = sentences or ["Nothing was concluded yet."]
    first, *others = (html.escape(sentence) for sentence in sentences)
    rest = "".join(f'<p class="sub">{sentence}</p>' for sentence in others)
    return html.card("", f'<p style="font-size:17px;font-weight:600">{first}</p>{rest}')


def pictures(document: Document) -> list[str]:
    rows = [row for row in document["rows"] if row["status"] == "ok" and html.number(row.get("samples_per_sec"))]
    return [speed_by_batch(rows), memory_by_batch(rows, document["header"]), wait_by_workers(rows, document)]


def _lines(
    rows: Iterable[Row],
    name: Callable[[Row], str],
    x: str,
    y: Callable[[Row], float | None],
    best: Callable[[Row], float],
    intervals: bool = False,
) -> list[Series]:
    """A line a name; where several rows have one x, the one with the largest `best`."""
    chosen: dict[str, dict[float, Row]] = {}
    for row in rows:
        if y(row) is None:
            continue
        points, at = chosen.setdefault(name(row), {}), row["combination"][x]
        if at not in points or best(row) > best(points[at]):
            points[at] = row
    lines = []
    for label, points in sorted(chosen.items()):
        places = sorted(points)
        bars = [points[at].get("samples_per_sec_ci95") if intervals else None for at in places]
        lines.append(Series(label, places, [y(points[at]) or 0.0 for at in places], intervals=bars))
    if len(lines) > MOST_LINES:
        fastest = sorted(chosen, key=lambda label: -max(map(best, chosen[label].values())))[:MOST_LINES]
        lines = [line for line in lines if line.name in fastest]
    return lines


def _batches(rows: Sequence[Row]) -> list[int]:
    return sorted({row["combination"]["batch_size"] for row in rows})


def _speed(row: Row) -> float:
    return float(row["samples_per_sec"])


def speed_by_batch(rows: Sequence[Row]) -> str:
    lines = _lines(rows, lambda row: row["combination"]["precision"], "batch_size", _speed, _speed, intervals=True)
    chart = line_chart(
        "Throughput against batch", lines, x_label="batch size (the fastest of the other settings at each)",
        y_label="images a second, 95 % interval", x_log=True, x_ticks=_batches(rows), from_zero=True, wide=True,
    )  # fmt: skip
    return chart


def memory_by_batch(rows: Sequence[Row], header: Mapping[str, Any]) -> str:
    """The most that a batch took, by precision and remat, under the memory there is."""
    swept = {row["combination"]["remat"] for row in rows}

    def name(row: Row) -> str:
        combination = row["combination"]
        return combination["precision"] + (f", remat {combination['remat']}" if len(swept) > 1 else "")

    def gib(row: Row) -> float | None:
        memory = memory_of(row)
        return memory / GIB if math.isfinite(memory) else None

    pools = [row["device_limit_bytes"] for row in rows if row.get("device_limit_bytes")]
    limit = max(pools, default=None) or html.number(header.get("memory_limit_bytes"))  # JAX may take a part of a card
    levels = [(f"limit {limit / GIB:.1f} GiB", limit / GIB)] if limit else []
    where = "device" if any(row.get("peak_memory_bytes") for row in rows) else "process"
    lines = _lines(rows, name, "batch_size", gib, lambda row: gib(row) or 0.0)
    return line_chart(
        "Memory against batch", lines, x_label="batch size", y_label=f"GiB, peak of the {where}", x_log=True,
        x_ticks=_batches(rows), from_zero=True, levels=levels,
    )  # fmt: skip


def wait_by_workers(rows: Sequence[Row], document: Document) -> str:
    """Of the loader's rows, those with the other settings of the choice; a line a batch."""
    best = best_row(document)
    others = ("precision", "remat", "grad_accum_steps")

    def wait(row: Row) -> float | None:
        value = html.number(row.get("data_wait_fraction"))
        return None if value is None else 100 * value

    loaded = [row for row in rows if row["combination"]["pipeline"] != "device"]
    like = [row for row in loaded if best and all(row["combination"][k] == best["combination"][k] for k in others)]
    lines = _lines(
        like or loaded, lambda row: f"batch {row['combination']['batch_size']:,}", "num_workers", wait, _speed
    )
    lines.sort(key=lambda line: int(line.name.split()[1].replace(",", "")))
    workers = sorted({row["combination"]["num_workers"] for row in loaded})
    return line_chart(
        "Data wait against workers", lines, x_label="workers", y_label="% of a step", x_ticks=workers, from_zero=True
    )


def knob_card(document: Document) -> str:
    knobs = (document.get("conclusion") or {}).get("knobs") or []
    if not knobs:
        return html.card("", html.absent("Only one value of each setting was measured."))
    rows = []
    for knob in knobs:
        for entry in knob["comparisons"]:
            interval, ratio = entry.get("interval"), entry.get("ratio")
            rows.append(
                [
                    KNOB_WORDS.get(knob["knob"], knob["knob"]),
                    f"{entry['from']} → {entry['to']}",
                    "–" if ratio is None else f"{ratio:.3f} x",
                    f"{interval[0]:.3f} to {interval[1]:.3f}" if interval else "–",
                    f"{entry['smallest']:.2f} to {entry['largest']:.2f}" if entry.get("smallest") else "–",
                    EFFECT_WORDS.get(entry["effect"], entry["effect"]),
                ]
            )
    note = "Speed at the second value over that at the first, between combinations that are equal in everything else."
    header = ("setting", "from → to", "ratio", "95 % interval", "smallest and largest pair", "effect")
    return html.card("", html.table(rows, header), note)


def failure_sections(rows: Sequence[Row]) -> list[Section]:
    """What was not measured, and why."""
    failed = [row for row in rows if row["status"] not in ("ok", "pending")]
    measured = [row for row in rows if row["status"] == "ok"]
    leaking = [row for row in measured if row.get("leak")]
    diverging = [row for row in measured if not is_finite(row)]
    if not failed and not leaking and not diverging:
        return []
    listed = [
        [
            Combination.from_dict(row["combination"]).label,
            STATUS_WORDS.get(row["status"], row["status"]),
            row.get("reason"),
        ]
        for row in failed
    ]
    for row in leaking:
        slope = html.number(row.get("memory_slope_bytes_per_step"))
        words = "memory grows" + ("" if slope is None else f" by {slope / 2**20:.2f} MiB a step")
        listed.append([Combination.from_dict(row["combination"]).label, "leaks", words])
    listed += [
        [Combination.from_dict(row["combination"]).label, "measured", "the loss is not finite"] for row in diverging
    ]
    return [Section("Failures", html.card("", html.table(listed, ("combination", "how it ended", "reason"))))]


def provenance(header: Mapping[str, Any]) -> str:
    """Command, machine, versions."""
    measured: list[Sequence[Any]] = [
        ["command", header.get("command")],
        ["measured batches", header.get("max_batches")],
        ["warm-up batches", header.get("warmup_batches")],
        ["repeats", header.get("repeats")],
        ["config", f"{header.get('config_name')} ({header.get('config_hash')})"],
        ["begun", header.get("created")],
    ]
    cards = [html.card("Measurement", _pairs(measured), wide=True)]
    for title, part in (("Machine", header.get("hardware")), ("Versions", header.get("versions"))):
        if part:
            cards.append(html.card(title, _pairs([_named(key, value) for key, value in part.items()])))
    return html.grid(cards)


def _named(key: str, value: Any) -> Sequence[Any]:
    if key.endswith("_bytes"):
        return key.removesuffix("_bytes").replace("_", " "), None if value is None else f"{value / GIB:.1f} GiB"
    return key.replace("_", " "), value


def _pairs(rows: Iterable[Sequence[Any]]) -> str:
    shown = [[name, html.short(v) if isinstance(v, float) else str(v)] for name, v in rows if v is not None]
    return f'<div class="pairs">{html.table(shown)}</div>'
