"""Profiles for people: the part of report.html, and the table that compares two of them."""

import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from jepa_jax.base.files import read_json_or_empty
from jepa_jax.base.text import duration, short
from jepa_jax.profiling.accounting import percentages
from jepa_jax.profiling.metrics import LABELS
from jepa_jax.profiling.profile_changes import Change
from jepa_jax.reports import parts
from jepa_jax.reports.charts import Series, line_chart
from jepa_jax.reports.page import write_page
from jepa_jax.reports.run_files import RunFiles, elements_of

SHOWN_EPOCHS = 40  # bars; of a longer run, evenly chosen ones
SHOWN_OPS = 15

Epoch = Mapping[str, Any]


def write_profile(folder: pathlib.Path) -> None:
    """Writes profile.html beside the profile.json of a loop that is no run."""
    write_page(folder / "profile.html", parts.Page(f"Profile: {folder.resolve().name}", [profile_section(folder)]))


def profile(run: RunFiles) -> parts.Section:
    return profile_section(run.workdir)


def profile_section(folder: pathlib.Path) -> parts.Section:
    """Returns what profile.json of a folder says; where there is none, a sentence that says so."""
    path = folder / "profile.json"
    if not path.exists():
        return parts.absent_section("Profile", "profile.json has not been written: no epoch has ended yet.")
    found = read_json_or_empty(path)
    try:
        epochs = [epoch for epoch in found["epochs"] if epoch["steps"]]
    except (TypeError, KeyError):
        return parts.absent_section("Profile", "profile.json cannot be read: it may have been cut off.")
    if not epochs:
        return parts.absent_section("Profile", "No epoch has been profiled.")
    rate = f"{elements_of(folder)} per second"
    speed = _series(rate, [(e["last_step"], e["images_per_second"]) for e in epochs])
    mfu = _series("MFU", [(e["last_step"], e["mfu"] and 100 * e["mfu"]) for e in epochs])
    cards = [
        time_by_epoch(epochs),
        bottlenecks(epochs[-1], found.get("notes") or []),
        line_chart("Throughput by epoch", [speed], y_label=rate, from_zero=True),
        line_chart("Model FLOP utilisation", [mfu], y_label="% of the peak", from_zero=True) if mfu.x else None,
        memory(found.get("samples") or []),
        *device_cards(found.get("device")),
    ]
    return parts.Section("Profile", [parts.card_grid(cards)])


def time_by_epoch(epochs: Sequence[Epoch]) -> parts.Card:
    """Returns one bar per epoch, as long as the epoch took and divided by section, and the sums of all epochs."""
    stride = -(-len(epochs) // SHOWN_EPOCHS)
    longest = max(epoch["seconds"] for epoch in epochs[::stride])
    bars = []
    for epoch in epochs[::stride]:
        seconds, shares = epoch["sections"], percentages(epoch["sections"])
        texts = {name: f"{label}: {shares[name]:.1f} %, {seconds[name]:.3f} s" for name, label in LABELS.items()}
        pieces = [parts.Piece(str(name), shares[name], text) for name, text in texts.items() if shares[name] > 0]
        width = 100 * epoch["seconds"] / longest if longest else 0.0
        bars.append(parts.StackedBar(pieces, f"epoch {short(epoch['epoch'])}", duration(epoch["seconds"]), width))
    totals = {name: sum(epoch["sections"][name] for epoch in epochs) for name in LABELS}
    shares = percentages(totals)
    used = sorted((name for name in LABELS if totals[name] > 0), key=lambda name: -totals[name])
    rows = [[LABELS[name], f"{shares[name]:.1f} %", f"{totals[name]:.2f} s"] for name in used]
    legend = {str(name): label for name, label in LABELS.items() if name in used}
    note = f"Every {stride}th of {len(epochs)} epochs. " if stride > 1 else ""
    if any(epoch["sections"].get("forward_pass") for epoch in epochs):
        note += "The split of a step (forward, backward, ...) is that of a few recorded steps, applied to the epoch. "
    note += "Time in which the device computed belongs to the step, whatever the host did meanwhile."
    table = parts.Table(rows, ["section, all epochs", "share", "time"])
    return parts.Card("Time by epoch", [parts.StackedBars(bars, legend), table], note, wide=True)


def bottlenecks(epoch: Epoch, notes: Sequence[str]) -> parts.Card:
    labels = {True: "Bottleneck", False: "Remark"}
    shown: list[parts.Part] = [parts.Text(f["message"], label=labels[f["warning"]]) for f in epoch["bottlenecks"]]
    shown += [parts.Text(note, "sub") for note in notes]
    shown = shown or [parts.absent("Nothing is above its threshold.")]
    return parts.Card(f"What slows epoch {short(epoch['epoch'])} down", shown, wide=True)


def memory(samples: Sequence[Mapping[str, Any]]) -> parts.Card:
    """Returns a chart of the memory of the process and, on GPUs, of the allocator, over the last session."""
    series = [_series("process", [(s["time"], s["process_ram_gb"]) for s in samples])]
    for index in range(max((len(sample["gpus"]) for sample in samples), default=0)):
        key = "allocated_gb" if any(s["gpus"][index]["allocated_gb"] is not None for s in samples) else "memory_used_gb"
        series.append(_series(f"GPU {index}", [(s["time"], s["gpus"][index][key]) for s in samples]))
    kept = [line for line in series if len(line.x)]
    return line_chart("Memory over time", kept, x_label="seconds", y_label="GiB", from_zero=True)


def _series(name: str, points: Sequence[tuple[float, float | None]]) -> Series:
    known = [(x, y) for x, y in points if y is not None]
    return Series(name, [x for x, _ in known], [y for _, y in known])


def device_cards(device: Mapping[str, Any] | None) -> list[parts.Card]:
    """Returns the share of each named scope in a step, and the longest instructions of the compiled step."""
    if not device:
        return [parts.Card("Device time", [parts.absent("No recording of the device has been read.")])]
    busy = 1e3 * device["busy_seconds"]

    def time(row: Mapping[str, Any]) -> list[str]:
        return [f"{100 * row['share']:.1f} %", f"{busy * row['share']:.2f} ms"]

    scopes = [
        [row["scope"] or "(no scope)", row["phase"], *time(row)] for row in device["scopes"] if row["share"] >= 0.0005
    ]
    header = ["operation", "where", "what", "share", "time per step"]
    rates = {"gflop_per_second": "GFLOP/s", "gb_per_second": "GB/s"}
    known = {key: label for key, label in rates.items() if any(row.get(key) for row in device["ops"])}
    operations = [
        [
            row["op"],
            " ".join(filter(None, (row["scope"], row["phase"]))),
            row["op_name"].rsplit("/", 1)[-1],
            *time(row),
            *(f"{row[key]:,.0f}" if row.get(key) else "–" for key in known),
        ]
        for row in device["ops"][:SHOWN_OPS]
    ]
    note = (
        f"One step takes {busy:.1f} ms of device time; {100 * device['attributed']:.0f} % of it belongs to named "
        "operations. A fused operation counts for the scope of its result."
    )
    if copied := device.get("copy_seconds"):
        note += f" Copies between host and device beside the step: {1e3 * copied:.2f} ms per step, not counted here."
    rate_note = "Operands and results count as read and written once." if known else ""
    return [
        parts.Card("Device time by scope", [parts.Table(scopes, ["scope", "phase", "share", "time per step"])], note),
        parts.Card("Longest device operations", [parts.Table(operations, [*header, *known.values()])], rate_note),
    ]


def changes_table(changes: Sequence[Change]) -> list[str]:
    lines = [f"{'section':<26}{'A':>12}{'B':>12}{'change':>12}   {'95 % interval':<27}"]
    for change in changes:
        relative = f"{100 * change.difference / change.a:+.1f} %" if change.a > 0 else "new"
        interval = "-" if math.isinf(change.high) else f"{1e3 * change.low:+.2f} .. {1e3 * change.high:+.2f} ms"
        lines.append(
            f"{change.section:<26}{1e3 * change.a:>9.2f} ms{1e3 * change.b:>9.2f} ms{relative:>12}   {interval:<27}"
            f"per {change.per}, {change.verdict()}"
        )
    return lines
