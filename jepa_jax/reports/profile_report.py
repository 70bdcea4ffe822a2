"""The profile part of report.html: time by section and epoch, throughput, memory, the device's operations, advice."""

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from jepa_jax.profiling.accounting import percentages
from jepa_jax.profiling.metrics import LABELS
from jepa_jax.profiling.sections import EpochSection
from jepa_jax.reports import html
from jepa_jax.reports.charts import Series, line_chart
from jepa_jax.reports.html import Section

# Hue, saturation, lightness: neighbours in the bar differ, related sections look alike, other is grey.
COLOURS = {
    "forward_pass": "217 70% 55%",
    "backward_pass": "217 65% 38%",
    "augment": "265 50% 60%",
    "optimizer_step": "190 60% 45%",
    "ema_update": "170 45% 40%",
    "data_wait": "8 75% 55%",
    "data_transfer": "28 80% 55%",
    "validation_epoch": "135 40% 45%",
    "visualization_generation": "95 40% 50%",
    "checkpoint": "45 75% 50%",
    "compile": "320 45% 55%",
    "other": "215 10% 60%",
}
SHOWN_EPOCHS = 40  # bars; of a longer run, evenly chosen ones
SHOWN_OPS = 15


def profile(run: Any) -> Section:
    """The section of a run (`report.RunFiles`); in words where there is no profile."""
    title = "Profile"
    try:
        found = json.loads((pathlib.Path(run.workdir) / "profile.json").read_text())
        epochs = [epoch for epoch in found["epochs"] if epoch["steps"]]
    except FileNotFoundError:
        return Section(title, html.card("", html.absent("profile.json has not been written: no epoch has ended yet.")))
    except (OSError, ValueError, TypeError, KeyError):
        return Section(title, html.card("", html.absent("profile.json cannot be read: it may have been cut off.")))
    if not epochs:
        return Section(title, html.card("", html.absent("No epoch has been profiled.")))
    cards = [
        time_by_epoch(epochs),
        advice(epochs[-1], found.get("notes") or []),
        *throughput(epochs),
        memory(found.get("samples") or []),
        device_scopes(found.get("device")),
        device_ops(found.get("device")),
    ]
    return Section(title, html.grid(cards))


def time_by_epoch(epochs: Sequence[Mapping[str, Any]]) -> str:
    """A bar an epoch, as long as the epoch took, divided by section."""
    stride = -(-len(epochs) // SHOWN_EPOCHS)
    shown = epochs[::stride]
    longest = max(epoch["seconds"] for epoch in shown)
    used = [name for name in EpochSection if any(epoch["sections"][name] > 0 for epoch in shown)]
    rows = "".join(_bar(epoch, used, longest) for epoch in shown)
    legend = "".join(
        f'<span style="display:inline-flex;align-items:center;gap:6px">'
        f'<i style="width:11px;height:11px;border-radius:3px;background:hsl({COLOURS[name]})"></i>'
        f"{html.escape(LABELS[name])}</span>"
        for name in used
    )
    total = percentages({name: sum(epoch["sections"][name] for epoch in epochs) for name in EpochSection})
    table = html.table(
        sorted(
            ([LABELS[n], f"{total[n]:.1f} %", f"{sum(e['sections'][n] for e in epochs):.2f} s"] for n in used),
            key=lambda row: -float(row[1].split()[0]),
        ),
        ["section, all epochs", "share", "time"],
    )
    note = "" if stride == 1 else f"Every {stride}th of {len(epochs)} epochs. "
    note += (
        "A second in which the device computed is the step's, whatever the host did; the rest is the host section's."
    )
    body = (
        f'<div style="display:grid;gap:4px">{rows}</div>'
        f'<div style="display:flex;flex-wrap:wrap;gap:4px 16px;font-size:12.5px;margin:12px 0">{legend}</div>{table}'
    )
    return html.card("Time by epoch", body, note, wide=True)


def _bar(epoch: Mapping[str, Any], names: Sequence[str], longest: float) -> str:
    percent = percentages(epoch["sections"])
    parts = "".join(
        f'<i title="{html.escape(LABELS[name])}: {percent[name]:.1f} %, {epoch["sections"][name]:.3f} s" '
        f'style="width:{percent[name]:.3f}%;background:hsl({COLOURS[name]})"></i>'
        for name in names
        if percent[name] > 0
    )
    width = 100 * epoch["seconds"] / longest if longest else 0
    return (
        '<div style="display:grid;grid-template-columns:72px 1fr 70px;gap:10px;align-items:center;font-size:12.5px">'
        f"<span>epoch {html.short(epoch['epoch'])}</span>"
        f'<span style="display:flex;height:16px;width:{width:.2f}%;border-radius:4px;overflow:hidden">{parts}</span>'
        f"<b>{html.duration(epoch['seconds'])}</b></div>"
    )


def advice(epoch: Mapping[str, Any], notes: Sequence[str]) -> str:
    """What held the last epoch up."""
    rows = [
        f"<p><b>{'Bottleneck' if row['warning'] else 'Remark'}</b> · {html.escape(row['message'])}</p>"
        for row in epoch["bottlenecks"]
    ]
    rows += [f'<p class="sub">{html.escape(note)}</p>' for note in notes]
    body = "".join(rows) or html.absent("Nothing is above its threshold.")
    return html.card(f"What holds epoch {html.short(epoch['epoch'])} up", body, wide=True)


def throughput(epochs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Images a second and, where the peak is known, the MFU."""
    points = [(e["last_step"], e["images_per_second"]) for e in epochs if e["images_per_second"] is not None]
    series = [Series("images a second", [x for x, _ in points], [y for _, y in points])]
    mfu = [(e["last_step"], 100 * e["mfu"]) for e in epochs if e["mfu"] is not None]
    chart = line_chart("Throughput by epoch", series, y_label="images a second", from_zero=True)
    if not mfu:
        return [chart]
    lines = [Series("MFU", [x for x, _ in mfu], [y for _, y in mfu])]
    return [chart, line_chart("Model FLOP utilisation", lines, y_label="% of the peak", from_zero=True)]


def memory(samples: Sequence[Mapping[str, Any]]) -> str:
    """The process's memory and, on GPUs, the allocator's, over the time of the last session."""
    series = [_series("process", [(s["time"], s["process_ram_gb"]) for s in samples])]
    for index in range(max((len(sample["gpus"]) for sample in samples), default=0)):
        key = "allocated_gb" if any(s["gpus"][index]["allocated_gb"] is not None for s in samples) else "memory_used_gb"
        series.append(_series(f"GPU {index}", [(s["time"], s["gpus"][index][key]) for s in samples]))
    kept = [line for line in series if len(line.x)]
    return line_chart("Memory over time", kept, x_label="seconds", y_label="GiB", from_zero=True)


def _series(name: str, points: Sequence[tuple[float, float | None]]) -> Series:
    known = [(x, y) for x, y in points if y is not None]
    return Series(name, [x for x, _ in known], [y for _, y in known])


def device_scopes(device: Mapping[str, Any] | None) -> str:
    """Forward and backward pass of each named scope."""
    title = "Device time by scope"
    if not device:
        return html.card(title, html.absent("No recording of the device has been read."))
    busy = device["busy_seconds"]
    rows = [
        [
            row["scope"] or "(no scope)",
            row["phase"],
            f"{100 * row['share']:.1f} %",
            f"{1e3 * busy * row['share']:.2f} ms",
        ]
        for row in device["scopes"]
        if row["share"] >= 0.0005
    ]
    note = (
        f"One step: {1e3 * busy:.1f} ms of device time; {100 * device['attributed']:.0f} % of it is tied to a named "
        "operation. A fused operation counts for the scope of its result."
    )
    return html.card(title, html.table(rows, ["scope", "phase", "share", "time a step"]), note)


def device_ops(device: Mapping[str, Any] | None) -> str:
    """The longest instructions of the compiled step."""
    title = "Longest device operations"
    if not device:
        return html.card(title, html.absent("No recording of the device has been read."))
    busy = device["busy_seconds"]
    rows = [
        [
            row["op"],
            " ".join(part for part in (row["scope"], row["phase"]) if part),
            row["op_name"].rsplit("/", 1)[-1],
            f"{100 * row['share']:.1f} %",
            f"{1e3 * busy * row['share']:.2f} ms",
        ]
        for row in device["ops"][:SHOWN_OPS]
    ]
    return html.card(title, html.table(rows, ["operation", "where", "what", "share", "time a step"]))
