"""Charts as HTML: bars of percentages and SVG line charts, for the pages of `jepa_jax.html`.

Charts are drawn here, not in the browser: the page is complete without JavaScript, which only adds the values under
the pointer, the log axis and hiding a series. Labels are HTML over a stretched SVG, so that text never scales.
"""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jepa_jax.base.text import LARGEST, percent, short
from jepa_jax.reports.html import absent, card, escape

MAX_POINTS = 600  # a series is drawn with at most this many points: more than a screen shows, little enough to load
FEW_POINTS = 30  # a line of so few has its points marked: a line of one would not be seen
WIDTH, HEIGHT = 1000, 400  # drawing units; the SVG is stretched to its box


@dataclasses.dataclass(frozen=True)
class Series:
    """One line (or the dots of one) of a chart; non-finite y are marked and leave a gap."""

    name: str
    x: Sequence[float] | np.ndarray
    y: Sequence[float] | np.ndarray
    style: str = "line"  # line | dots | both
    intervals: Sequence[tuple[float, float] | None] = ()  # of each y, drawn as a bar; of a series with finite values


@dataclasses.dataclass(frozen=True)
class Bar:
    label: str
    value: float | None
    kind: str = ""  # main | run | baseline: the colour
    note: str = ""


def bars(groups: Mapping[str, Sequence[Bar]], largest: float = 100.0) -> str:
    """Horizontal bars of percentages under the heading of their group."""
    out = []
    for heading, items in groups.items():
        if not items:
            continue
        out.append(f'<div class="group">{escape(heading)}</div>')
        for bar in items:
            width = 0.0 if bar.value is None else 100 * min(max(bar.value / largest, 0), 1)
            out.append(
                f'<div class="bar {escape(bar.kind)}" title="{escape(bar.label)}: {percent(bar.value)}">'
                f'<span class="label">{escape(bar.label)}<small>{escape(bar.note)}</small></span>'
                f'<span class="track"><i style="width:{width:.2f}%"></i></span><b>{percent(bar.value)}</b></div>'
            )
    return f'<div class="bars">{"".join(out)}</div>'


def decimate(x: np.ndarray, y: np.ndarray, limit: int = MAX_POINTS) -> tuple[np.ndarray, np.ndarray]:
    """At most `limit` points: the first, the last, and the smallest and largest of each stretch between."""
    if len(x) <= limit:
        return x, y
    keep = {0, len(x) - 1}
    for part in np.array_split(np.arange(len(x)), (limit - 2) // 2):
        keep.update((part[np.argmin(y[part])], part[np.argmax(y[part])]))
    index = np.array(sorted(keep))
    return x[index], y[index]


def running_mean(y: np.ndarray, window: int) -> np.ndarray:
    """Centred mean over `window` points, over fewer at the ends."""
    ones = np.ones(window)
    return np.convolve(y, ones, "same") / np.convolve(np.ones(len(y)), ones, "same")


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers (1, 2, 2.5 or 5 x 10^k apart) inside [low, high]."""
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = power * next(m for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [k * step for k in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten inside [low, high] (exponents), with 2 and 5 between them when there are few."""
    low_power, high_power = math.floor(low), math.ceil(high)
    mantissas = (1,) if high - low > 3 else (1, 2, 5)
    stride = max(1, (high_power - low_power) // 6)
    values = [p + math.log10(m) for p in range(low_power, high_power + 1, stride) for m in mantissas]
    inside = [v for v in values if low <= v <= high]
    return inside if len(inside) > 1 else ticks(low, high)


def span(values: np.ndarray, padding: float = 0.06) -> tuple[float, float]:
    """The range of an axis: that of the values and a margin, never empty."""
    if not len(values):
        return 0.0, 1.0
    low, high = float(np.min(values)), float(np.max(values))
    margin = padding * (high - low)
    if high - low <= 1e-9 * max(abs(low), abs(high)) or high - low < 1e-200:
        margin = 0.1 * max(abs(low), abs(high)) or 1.0
    if margin < 1e-150:
        margin = 1e-150
    return low - margin, high + margin


def _path(x: np.ndarray, y: np.ndarray, breaks: np.ndarray) -> str:
    """SVG path of points in [0, 1]^2, y up; a point alone between two breaks becomes a dot."""
    out = []
    for i, (px, py) in enumerate(zip(x * WIDTH, (1 - y) * HEIGHT, strict=True)):
        starts = i == 0 or breaks[i]
        alone = starts and (i + 1 == len(x) or breaks[i + 1])
        out.append(f"{'M' if starts else 'L'}{px:.1f} {py:.1f}{'h0' if alone else ''}")
    return "".join(out)


def line_chart(
    title: str,
    series: Sequence[Series],
    *,
    x_label: str = "step",
    y_label: str = "",
    log: str = "",
    x_log: bool = False,
    x_ticks: Sequence[float] = (),
    smooth: bool = False,
    from_zero: bool = False,
    levels: Sequence[tuple[str, float]] = (),
    per_x: tuple[str, float] | None = None,
    wide: bool = False,
) -> str:
    """A card with one chart.

    Args:
      log: "" for a linear axis alone, "offer" for a button, "first" to begin with the logarithm.
      x_ticks: where the x axis has its numbers; else at round ones.
      smooth: long series are drawn faint under their running mean.
      levels: named horizontal lines.
      per_x: a second unit of x for the value box, e.g. ("epoch", 1 / steps_per_epoch).
    """
    lines, notes, windows = [], [], set()
    for s in series:
        x, y = np.asarray(s.x, np.float64), np.asarray(s.y, np.float64)
        usable = np.isfinite(x) & (x > 0 if x_log else True) & (np.abs(x) < LARGEST)
        x, y = (np.log10(x[usable]) if x_log else x[usable]), y[usable]
        good = np.isfinite(y) & (np.abs(y) < LARGEST)
        if not good.all():
            notes.append(f"{s.name}: {int((~good).sum()):,} non-finite values, marked in red.")
        lines.append((s, x[good], y[good], x[~good]))
    if not any(len(x) or len(bad) for _, x, _, bad in lines):
        return card(title, absent("No values were recorded."), wide=wide)
    every_x = np.concatenate([np.concatenate([x, bad]) for _, x, _, bad in lines])
    ends = [end for s in series for interval in s.intervals if interval for end in interval]
    every_y = np.concatenate([y for _, _, y, _ in lines] + [np.array([v for _, v in levels] + ends, np.float64)])
    x_low, x_high = span(every_x, 0.04 if x_log else 0.0)
    if not x_log and 0 <= x_low < 0.1 * x_high:
        x_low = 0.0

    def to_unit(x):
        return (x - x_low) / (x_high - x_low)

    positive = every_y[every_y > 0]
    if len(positive) < 2 or (every_y < 0).any():
        log = ""  # there is no logarithm of a negative loss
    y_low, y_high = span(np.append(every_y, 0.0) if from_zero else every_y)
    if len(every_y) and every_y.min() >= 0:
        y_low = max(y_low, 0.0)
    scales = {"lin": (y_low, y_high)} | ({"log": span(np.log10(positive))} if log else {})

    drawn: list[tuple] = []
    red: list[float] = []
    for i, (s, x, y, bad) in enumerate(lines):
        window = max(1, len(y) // 40) if smooth and len(y) > 200 else 1
        if window > 1:
            windows.add(window)
        style = "both" if s.style == "line" and len(y) <= FEW_POINTS else s.style
        curves = [("raw" if window > 1 else style, x, y)]
        if window > 1:
            curves.append(("line", x, running_mean(y, window)))
        for style, cx, cy in curves:
            px, py = decimate(cx, cy)
            seen = np.searchsorted(np.sort(bad), px)
            drawn.append((i, style, px, py, np.append(False, np.diff(seen) != 0)))
        red.extend(np.unique(bad)[:: max(1, len(bad) // 100)])
    if windows:
        notes.append(f"Bold: running mean over {' or '.join(f'{w:,}' for w in sorted(windows))} values.")

    def layer(name: str) -> str:
        low, high = scales[name]
        paths, labels = [], []
        for tick in log_ticks(low, high) if name == "log" else ticks(low, high):
            at = (tick - low) / (high - low)
            paths.append(f'<path class="gridline" d="M0 {(1 - at) * HEIGHT:.1f}H{WIDTH}"/>')
            shown = 10**tick if name == "log" else tick
            labels.append(f'<span class="y" style="top:{100 * (1 - at):.2f}%">{short(shown)}</span>')
        for text, value in levels:
            if name == "log" and value <= 0:
                continue
            at = ((math.log10(value) if name == "log" else value) - low) / (high - low)
            paths.append(f'<path class="level" d="M0 {(1 - at) * HEIGHT:.1f}H{WIDTH}"/>')
            labels.append(f'<span class="level" style="top:{100 * (1 - at):.2f}%">{escape(text)}</span>')
        for i, style, x, y, breaks in drawn:
            keep = y > 0 if name == "log" else np.ones(len(y), bool)
            py = ((np.log10(y[keep]) if name == "log" else y[keep]) - low) / (high - low)
            px = to_unit(x[keep])
            gaps = np.ones(len(px), bool) if style == "dots" else breaks[keep]
            paths.append(f'<path class="{style} s{i % 8}" data-s="{i}" d="{_path(px, py, gaps)}"/>')
            if style == "both":
                dots = _path(px, py, np.ones(len(px), bool))
                paths.append(f'<path class="dots s{i % 8}" data-s="{i}" d="{dots}"/>')
        for i, s in enumerate(series):
            for x, interval in zip(s.x, s.intervals, strict=False):
                if interval and not (name == "log" and interval[0] <= 0):
                    at = to_unit(math.log10(x) if x_log else x) * WIDTH
                    bottom, top = (math.log10(end) if name == "log" else end for end in interval)
                    paths.append(
                        _interval_bar(i, at, *((1 - (y - low) / (high - low)) * HEIGHT for y in (bottom, top)))
                    )
        for x in red:
            paths.append(f'<path class="bad" d="M{to_unit(x) * WIDTH:.1f} 0v12"/>')
        svg = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none">{"".join(paths)}</svg>'
        return f'<div class="layer {name}">{svg}{"".join(labels)}</div>'

    marks = log_ticks(x_low, x_high) if x_log else ticks(x_low, x_high, 6)
    if len(x_ticks):
        marks = [math.log10(at) if x_log else at for at in x_ticks]
    x_labels = "".join(
        f'<span class="x" style="left:{100 * to_unit(at):.2f}%">{short(10**at if x_log else at)}</span>' for at in marks
    )
    data = {
        "x": [x_low, x_high], "xlog": x_log, "xname": x_label, "per": per_x, "scales": scales,
        "series": [
            {"name": s.name, "x": _rounded(px), "y": _rounded(py)}
            for s, x, y, _ in lines for px, py in [decimate(x, y)]
        ],
    }  # fmt: skip
    legend = "".join(
        f'<button type="button" class="key s{i % 8}" data-s="{i}" aria-pressed="true">{escape(s.name)}</button>'
        for i, s in enumerate(series)
    )
    toggle = '<button type="button" class="toggle">log</button>' if log else ""
    return (
        f'<div class="card{" wide" if wide else ""}"><figure class="chart{" log" if log == "first" else ""}">'
        f'<figcaption><h3>{escape(title)}</h3><span class="unit">{escape(y_label)}</span>{toggle}</figcaption>'
        f'<div class="plot" role="img" aria-label="{escape(title)}">{"".join(layer(name) for name in scales)}{x_labels}'
        f'<span class="xlabel">{escape(x_label)}</span></div>'
        f'<div class="legend">{legend if len(series) > 1 else ""}</div>'
        f'<script type="application/json">{_inline_json(data)}</script></figure>'
        f"{''.join(f'<p class=note>{escape(n)}</p>' for n in notes)}</div>"
    )


def _interval_bar(series: int, x: float, bottom: float, top: float) -> str:
    cap = WIDTH / 160
    path = f"M{x:.1f} {bottom:.1f}V{top:.1f}" + "".join(f"M{x - cap:.1f} {y:.1f}h{2 * cap:.1f}" for y in (bottom, top))
    return f'<path class="raw s{series % 8}" style="opacity:.8" data-s="{series}" d="{path}"/>'


def _rounded(values: np.ndarray) -> list[float]:
    return [float(f"{v:.6g}") for v in values]


def _inline_json(data: Any) -> str:
    # "<" could end the script element early.
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
