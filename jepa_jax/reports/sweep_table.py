"""The rows of a sweep as tables: Markdown for docs, HTML that sorts by any column."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jepa_jax.reports import html
from jepa_jax.tuning.settings import KNOBS

Row = Mapping[str, Any]
Cell = Callable[[Row], tuple[str, float | None]]
GIB = 2**30
STATUS_WORDS = {
    "ok": "measured", "out_of_memory": "out of memory", "crashed": "crashed", "timed_out": "timed out",
    "refused": "refused", "skipped": "skipped", "pending": "not yet measured",
}  # fmt: skip
KNOB_WORDS = {
    "batch_size": "batch", "num_workers": "workers", "grad_accum_steps": "accumulation", "precision": "precision",
    "remat": "remat", "pipeline": "pipeline",
}  # fmt: skip


def _scaled(name: str, factor: float, digits: int = 3) -> Cell:
    def cell(row: Row) -> tuple[str, float | None]:
        value = html.number(row.get(name))
        return html.short(None if value is None else factor * value, digits), value

    return cell


def interval_text(row: Row) -> tuple[str, float | None]:
    """Half the interval's width in percent: the same size whatever the speed."""
    interval, speed = row.get("samples_per_sec_ci95"), html.number(row.get("samples_per_sec"))
    if not interval or not speed:
        return "–", None
    half = 50 * (interval[1] - interval[0]) / speed
    return f"± {half:.1f} %", half


def memory_of(row: Row) -> float:
    """Returns the peak of the device's allocator, or of the processes where there is none; infinite if unknown."""
    return float(row.get("peak_memory_bytes") or row.get("process_memory_bytes") or math.inf)


def is_finite(row: Row) -> bool:
    """Returns whether every loss that was seen is a number."""
    return row.get("finite", True) is not False


def memory_text(row: Row) -> tuple[str, float | None]:
    value = memory_of(row)
    return (f"{value / GIB:.2f}", value) if math.isfinite(value) else ("–", None)


# Column of both tables -> its cell: text, and the number it is sorted by.
FIGURES: dict[str, Cell] = {
    "images/s": _scaled("samples_per_sec", 1, 4),
    "95 %": interval_text,
    "step ms": _scaled("step_time_p50", 1e3),
    "p95 ms": _scaled("step_time_p95", 1e3),
    "memory GiB": memory_text,
    "data wait %": _scaled("data_wait_fraction", 100),
    "MFU %": _scaled("mfu", 100),
    "GPU %": _scaled("gpu_sm_util", 1),
    "CPU %": _scaled("cpu_percent", 1),
    "compile s": _scaled("compile_seconds", 1),
}


def markdown_table(rows: Sequence[Row]) -> str:
    """Every row, the fastest first; columns that no row has a figure for are left out."""
    columns = _known_columns(rows)
    header = [*KNOB_WORDS.values(), *columns, "status"]
    lines = [header, ["---"] * len(KNOBS) + ["---:"] * len(columns) + ["---"]]
    for row in _ordered(rows):
        knobs = [str(row["combination"][name]) for name in KNOB_WORDS]
        figures = [cell(row)[0] if row["status"] == "ok" else "–" for cell in columns.values()]
        lines.append([*knobs, *figures, _status(row).replace("|", "\\|").replace("\n", " ")])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _known_columns(rows: Sequence[Row]) -> dict[str, Cell]:
    return {name: cell for name, cell in FIGURES.items() if any(cell(row)[1] is not None for row in rows)}


def _ordered(rows: Sequence[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: -(html.number(row.get("samples_per_sec")) or 0.0))


def _status(row: Row) -> str:
    words = status_words(row)
    return f"{words}: {row['reason']}" if row["status"] != "ok" and row.get("reason") else words


def status_words(row: Row) -> str:
    """How it ended; of a row that was measured, what is wrong with it."""
    if row["status"] == "ok" and not is_finite(row):
        return "loss not finite"
    if row["status"] == "ok" and row.get("leak"):
        return "leaks"
    words: str = STATUS_WORDS.get(row["status"]) or row["status"]
    return words


def sortable_table(rows: Sequence[Row], best: Row | None) -> str:
    """Every row, the fastest first, `best` marked; a click on a heading sorts by it."""
    columns = _known_columns(rows)
    knobs = {name: word for name, word in KNOB_WORDS.items() if len({row["combination"][name] for row in rows}) > 1}
    constant = [f"{KNOB_WORDS[n]} {rows[0]['combination'][n]}" for n in KNOB_WORDS if n not in knobs and rows]
    note = f'<p class="note">The same in all: {html.escape(", ".join(constant))}.</p>' if constant else ""
    right = ' class="num"'
    names = {word: right if isinstance(rows[0]["combination"][name], int) else "" for name, word in knobs.items()}
    names |= dict.fromkeys(columns, right) | {"status": ""}
    head = "".join(
        f'<th{kind} aria-sort="none"><button type="button">{html.escape(name)}</button></th>'
        for name, kind in names.items()
    )
    body = "".join(_table_row(row, knobs, columns, row is best) for row in _ordered(rows))
    table = f'<table class="sortable"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
    return f'<div class="scroll">{table}</div>{note}<style>{SORT_STYLE}</style><script>{SORT_SCRIPT}</script>'


def _table_row(row: Row, knobs: Iterable[str], columns: Mapping[str, Cell], is_best: bool) -> str:
    cells = []
    for name in knobs:
        value = row["combination"][name]
        number = isinstance(value, int)
        text = html.short(value) if number else html.escape(value)
        cells.append(f'<td data-v="{html.escape(value)}"{" class=num" if number else ""}>{text}</td>')
    for cell in columns.values():
        text, value = cell(row) if row["status"] == "ok" else ("–", None)
        cells.append(f'<td class="num" data-v="{"" if value is None else value}">{html.escape(text)}</td>')
    shown = status_words(row)
    kind = "" if shown == STATUS_WORDS["ok"] else ' class="bad"'
    cells.append(f'<td data-v="{html.escape(shown)}"{kind}>{html.escape(shown)}</td>')
    return f"<tr{' class=marked' if is_best else ''}>{''.join(cells)}</tr>"


SORT_STYLE = """
.sortable th button{border:0;padding:0;font:inherit;font-weight:600;color:inherit;white-space:nowrap}
.sortable th[aria-sort=ascending] button:after{content:" ↑"}
.sortable th[aria-sort=descending] button:after{content:" ↓"}
.sortable{font-size:12.5px}.sortable td{white-space:nowrap}
.sortable td.bad{color:var(--bad)}.sortable tbody tr:hover td{background:var(--bg)}
"""
# Empty cells stay last in both directions: a failure is neither the fastest nor the slowest.
SORT_SCRIPT = """
document.querySelectorAll(".sortable").forEach(table => {
  const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0];
  heads.forEach((head, column) => head.querySelector("button").onclick = () => {
    const up = head.getAttribute("aria-sort") === "none" ? !head.classList.contains("num")
      : head.getAttribute("aria-sort") === "descending";
    heads.forEach(other => other.setAttribute("aria-sort", "none"));
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    const value = row => row.cells[column].dataset.v, number = v => v !== "" && isFinite(v);
    const order = (a, b) => number(a) && number(b) ? a - b : a.localeCompare(b);
    const rows = [...body.rows].sort((a, b) => {
      const [x, y] = [value(a), value(b)];
      return x === "" || y === "" ? (x === "") - (y === "") : (up ? 1 : -1) * order(x, y);
    });
    body.append(...rows);
  });
});
"""
