"""The layout of charts: lines, dots, scatter plots and heat maps.

Charts are laid out here and not in the browser: a page is complete without JavaScript, which only adds the values under
the pointer, the logarithmic axis and hiding a series. `reports.page.write_figure` writes the same charts as SVG files.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jepa_jax.base.text import LARGEST, short
from jepa_jax.reports.parts import Card, Chart, HeatMap, Layer, MapLabel, absent

MAX_POINTS = 600  # a series is drawn with at most this many points: more than a screen shows, little enough to load
FEW_POINTS = 30  # the points of a shorter line are marked: a line of one point would be invisible
MANY_CLASSES = 20  # a scatter plot or heat map of more classes does not name them
WIDTH, HEIGHT = 1000, 100  # drawing units of templates/parts.html; the SVG is stretched to its box
CELL, MAP_SIDE = (46.0, 28.0), 520.0  # pixels of a cell of a heat map, and of a map of many cells
LETTER, TOP = 6.6, 6.0  # pixels of a letter, about, and above a heat map
COLOURS = 10  # of templates/page.css; more series get hues of their own
CAP = WIDTH / 160  # half the width of the ends of an interval


class Series(NamedTuple):
    """One line of a chart, or its dots; values that are not finite are marked and leave a gap."""

    name: str
    x: Sequence[float] | np.ndarray
    y: Sequence[float] | np.ndarray
    style: str = "line"  # line | dots | both | points (small dots)
    intervals: Sequence[Sequence[float] | None] = ()  # low and high end at each x, drawn as a bar
    labels: Sequence[str] = ()  # texts beside the points


class Line(NamedTuple):
    """The values of a series that can be drawn, and the x of those that cannot."""

    series: Series
    x: np.ndarray
    y: np.ndarray
    bad: np.ndarray
    window: int  # of the running mean; 1 for none


class Axis(NamedTuple):
    """The range of an axis, in powers of ten on a logarithmic one."""

    low: float
    high: float
    is_log: bool = False

    def place(self, values: Any) -> Any:
        """Returns where a value, or an array of values, lies on the axis, from 0 to 1."""
        if self.is_log:
            values = np.log10(np.maximum(values, np.finfo(np.float64).tiny))  # means of smaller numbers may be 0
        return (values - self.low) / (self.high - self.low)

    def ticks(self, count: int = 5) -> list[float]:
        """Returns round values inside the range."""
        if self.is_log:
            return [10**power for power in log_ticks(self.low, self.high)]
        return ticks(self.low, self.high, count)


def line_chart(
    title: str,
    series: Sequence[Series],  # their order decides their colours
    *,
    x_label: str = "step",
    y_label: str = "",
    log: str = "",  # "": a linear y axis alone, "offer": a button for the logarithm, "first": begins with the logarithm
    x_log: bool = False,
    x_ticks: Sequence[float] = (),  # where the x axis has numbers; by default at round values
    smooth: bool = False,  # draws long series faint under their running mean
    from_zero: bool = False,  # includes zero in the y axis
    levels: Sequence[tuple[str, float]] = (),  # named horizontal lines
    per_x: tuple[str, float] | None = None,  # a second unit of x under the pointer: ("epoch", 1 / steps_per_epoch)
    wide: bool = False,
) -> Card:
    lines = [usable_line(one, x_log, smooth) for one in series]
    if not any(len(line.x) or len(line.bad) for line in lines):
        return Card(title, [absent("No values were recorded.")], wide=wide)
    places = np.concatenate([part for line in lines for part in (line.x, line.bad)])
    x_low, x_high = span(np.log10(places), 0.04) if x_log else span(places, 0.0)
    near_zero = not x_log and 0 <= x_low < 0.1 * x_high
    x_axis = Axis(0.0 if near_zero else x_low, x_high, x_log)
    ends = [end for one in series for interval in one.intervals if interval for end in interval]
    extra = np.array([value for _, value in levels] + ends, np.float64)
    y_axes = make_y_axes(np.concatenate([*(line.y for line in lines), extra]), bool(log), from_zero)
    marked = [x for line in lines for x in np.unique(line.bad)[:: max(1, len(line.bad) // 100)]]
    colours = [f"var(--c{index})" for index in range(len(series))]
    if len(series) > COLOURS:
        colours = [f"hsl({360 * index // len(series)} 65% 50%)" for index in range(len(series))]
    chart = Chart(
        title,
        x_label,
        y_label,
        layers=[make_layer(name, lines, levels, x_axis, axis) for name, axis in y_axes.items()],
        x_ticks=[(100 * x_axis.place(x), short(x)) for x in x_ticks or x_axis.ticks(6)],
        bad_marks=[WIDTH * x_axis.place(x) for x in marked],
        colours=colours,
        legend=[one.name for one in series] if len(series) > 1 else [],
        notes=chart_notes(lines),
        starts_log=log == "first" and "log" in y_axes,
        data={
            "x": x_axis[:2],
            "xlog": x_log,
            "xname": x_label,
            "per": per_x,
            "scales": {name: axis[:2] for name, axis in y_axes.items()},
            "colours": colours,
            "series": [
                {"name": line.series.name, "x": _rounded(x), "y": _rounded(y)}
                for line in lines
                for x, y in [decimate(np.log10(line.x) if x_log else line.x, line.y)]
            ],
        },
    )
    return Card("", [chart], wide=wide)


def scatter_chart(
    title: str,
    points: np.ndarray,  # [N, 2]
    labels: np.ndarray | None = None,  # [N], indices of classes
    classes: Sequence[str] = (),
    *,
    x_label: str = "",
    y_label: str = "",
) -> Card:
    """Returns a card with one dot per point, in the colour of its class, on axes without numbers."""
    groups = [points[labels == index] for index in range(len(classes))] if labels is not None else []
    names = classes if groups else [title]
    series = [Series(name, own[:, 0], own[:, 1], "points") for name, own in zip(names, groups or [points], strict=True)]
    card = line_chart(title, series, x_label=x_label, y_label=y_label)
    chart = card.parts[0]
    assert isinstance(chart, Chart)  # there are points
    layers = [layer._replace(ticks=[]) for layer in chart.layers]
    legend = chart.legend if len(classes) <= MANY_CLASSES else []
    bare = chart._replace(layers=layers, x_ticks=[], legend=legend, tall=True, data={**chart.data, "series": []})
    return card._replace(parts=[bare])


def heat_map(
    title: str,
    values: Sequence[Sequence[float]] | np.ndarray,  # [rows, columns]
    rows: Sequence[str],
    columns: Sequence[str],
    *,
    x_label: str = "",
    y_label: str = "",
    limits: tuple[float, float] | None = None,  # the values of the lightest and the darkest cell; default: the extremes
    text: str = "{:.0f}",
    least: float = -math.inf,  # smaller values are not written into their cells
    marked: tuple[int, int] | None = None,  # row and column of a framed cell
    note: str = "",
) -> Card:
    """Returns a card with a table of numbers, each cell the darker the larger its value."""
    numbers = np.asarray(values, np.float64)
    low, high = limits or (numbers.min(), numbers.max())
    shades = np.clip((numbers - low) / max(high - low, 1e-12), 0, 1)
    few = max(numbers.shape) <= MANY_CLASSES
    if not few:
        rows, columns = [], []
    width, height = CELL if few else (MAP_SIDE / numbers.shape[1], MAP_SIDE / numbers.shape[0])
    left = 36 + LETTER * max(map(len, rows), default=0)
    right, bottom = left + width * numbers.shape[1], TOP + height * numbers.shape[0]
    tilted = max(map(len, columns), default=0) > 5
    depth = 0.7 * LETTER * max(map(len, columns)) if tilted else 12  # of the names of columns
    turned = ("end", -45) if tilted else ("middle", 0)
    labels = [
        *(MapLabel(left - 6, TOP + (i + 0.5) * height + 4, name, "end") for i, name in enumerate(rows)),
        *(MapLabel(left + (i + 0.5) * width, bottom + 16, name, *turned) for i, name in enumerate(columns)),
        MapLabel((left + right) / 2, bottom + depth + 26, x_label, "middle"),
        MapLabel(16, (TOP + bottom) / 2, y_label, "middle", -90),
    ]
    cells = []
    for (row, column), shade in np.ndenumerate(shades):
        shown = text.format(numbers[row, column]) if few and numbers[row, column] >= least else ""
        if shown or shade >= 0.002:
            cells.append((left + column * width, TOP + row * height, float(shade), shown))
    chosen = None if marked is None else (left + marked[1] * width, TOP + marked[0] * height)
    frame = left, TOP, right, bottom
    drawn = HeatMap(title, right + 12, bottom + depth + 34, frame, (width, height), cells, labels, chosen)
    return Card(title, [drawn], note)


def usable_line(series: Series, x_log: bool, smooth: bool) -> Line:
    """Returns the values of a series that can be drawn, apart from those that are not finite."""
    x, y = np.asarray(series.x, np.float64), np.asarray(series.y, np.float64)
    usable = np.isfinite(x) & (np.abs(x) < LARGEST) & (x > 0 if x_log else True)
    x, y = x[usable], y[usable]
    good = np.isfinite(y) & (np.abs(y) < LARGEST)
    window = max(1, good.sum() // 40) if smooth and good.sum() > 200 else 1
    return Line(series, x[good], y[good], x[~good], int(window))


def make_y_axes(values: np.ndarray, with_log: bool, from_zero: bool) -> dict[str, Axis]:
    """Returns the linear axis and, if asked for and no value is negative, the logarithmic one."""
    low, high = span(np.append(values, 0.0) if from_zero else values)
    if len(values) and values.min() >= 0:
        low = max(low, 0.0)
    axes = {"lin": Axis(low, high)}
    positive = values[values > 0]
    if with_log and len(positive) >= 2 and not (values < 0).any():
        axes["log"] = Axis(*span(np.log10(positive)), is_log=True)
    return axes


def make_layer(
    name: str, lines: Sequence[Line], levels: Sequence[tuple[str, float]], x_axis: Axis, y_axis: Axis
) -> Layer:
    """Returns everything that depends on the kind of the y axis."""
    paths, labels = [], []
    for index, line in enumerate(lines):
        paths += line_paths(index, line, x_axis, y_axis)
        for x, y, text in zip(line.series.x, line.series.y, line.series.labels, strict=False):
            if np.isfinite(y):
                labels.append((100 * x_axis.place(x), 100 * (1 - y_axis.place(y)), text))
        for x, interval in zip(line.series.x, line.series.intervals, strict=False):
            if interval and (interval[0] > 0 or not y_axis.is_log):
                at, (bottom, top) = WIDTH * x_axis.place(x), HEIGHT * (1 - y_axis.place(np.asarray(interval)))
                caps = "".join(f"M{at - CAP:.1f} {y:.2f}h{2 * CAP:.1f}" for y in (bottom, top))
                paths.append(("interval", index, f"M{at:.1f} {bottom:.2f}V{top:.2f}{caps}"))
    shown = [(text, value) for text, value in levels if value > 0 or not y_axis.is_log]
    return Layer(
        name,
        ticks=[(100 * (1 - y_axis.place(value)), short(value)) for value in y_axis.ticks()],
        levels=[(100 * (1 - y_axis.place(value)), text) for text, value in shown],
        paths=paths,
        labels=labels,
    )


def line_paths(index: int, line: Line, x_axis: Axis, y_axis: Axis) -> list[tuple[str, int, str]]:
    """Returns a line thinned out: a long one may be faint below its running mean, a short one has dots."""
    style = "both" if line.series.style == "line" and len(line.y) <= FEW_POINTS else line.series.style
    drawn = [(style, line.y)]
    if line.window > 1:
        drawn = [("raw", line.y), ("line", running_mean(line.y, line.window))]
    paths = []
    for style, values in drawn:
        x, y = (line.x, values) if style == "points" else decimate(line.x, values)
        if y_axis.is_log:
            x, y = x[y > 0], y[y > 0]
        passed = np.searchsorted(np.sort(line.bad), x)
        joined = np.append(False, np.diff(passed) == 0)  # a value that is not finite breaks the line
        x, y = x_axis.place(x), y_axis.place(y)
        if style not in ("dots", "points"):
            paths.append((style, index, svg_path(x, y, joined)))
        if style in ("dots", "points", "both"):
            kind = "dots" if style == "both" else style
            paths.append((kind, index, svg_path(x, y, np.zeros(len(x), bool))))
    return paths


def svg_path(x: np.ndarray, y: np.ndarray, joined: np.ndarray) -> str:
    """Returns the SVG path of points in [0, 1]^2, y upwards; a point that is joined to no other becomes a dot."""
    out = []
    for i, (px, py) in enumerate(zip(x * WIDTH, (1 - y) * HEIGHT, strict=True)):
        alone = not joined[i] and (i + 1 == len(x) or not joined[i + 1])
        out.append(f"{'L' if joined[i] else 'M'}{px:.1f} {py:.2f}{'h0' if alone else ''}")
    return "".join(out)


def chart_notes(lines: Sequence[Line]) -> list[str]:
    """Returns how many values were not finite, and over how many the running means are taken."""
    notes = [f"{one.series.name}: {len(one.bad):,} non-finite values, marked in red." for one in lines if len(one.bad)]
    windows = sorted({line.window for line in lines if line.window > 1})
    if windows:
        notes.append(f"Bold: running mean over {' or '.join(f'{window:,}' for window in windows)} values.")
    return notes


def _rounded(values: np.ndarray) -> list[float]:
    return [float(f"{value:.6g}") for value in values]


def decimate(x: np.ndarray, y: np.ndarray, limit: int = MAX_POINTS) -> tuple[np.ndarray, np.ndarray]:
    """Returns at most `limit` points: the first, the last, and the smallest and largest of each stretch between."""
    if len(x) <= limit:
        return x, y
    keep = {0, len(x) - 1}
    for part in np.array_split(np.arange(len(x)), (limit - 2) // 2):
        keep.update((part[np.argmin(y[part])], part[np.argmax(y[part])]))
    index = np.array(sorted(keep))
    return x[index], y[index]


def running_mean(y: np.ndarray, window: int) -> np.ndarray:
    """Returns the centred mean over `window` points, over fewer at the ends."""
    ones = np.ones(window)
    return np.convolve(y, ones, "same") / np.convolve(np.ones(len(y)), ones, "same")


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Returns round numbers (1, 2, 2.5 or 5 x 10^k apart) inside [low, high]."""
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = power * next(m for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [k * step for k in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Returns powers of ten inside [low, high] (exponents), with 2 and 5 between them when there are few."""
    low_power, high_power = math.floor(low), math.ceil(high)
    mantissas = (1,) if high - low > 3 else (1, 2, 5)
    stride = max(1, (high_power - low_power) // 6)
    values = [p + math.log10(m) for p in range(low_power, high_power + 1, stride) for m in mantissas]
    inside = [v for v in values if low <= v <= high]
    return inside if len(inside) > 1 else ticks(low, high)


def span(values: np.ndarray, padding: float = 0.06) -> tuple[float, float]:
    """Returns the range of the values with a margin; it is never empty."""
    if not len(values):
        return 0.0, 1.0
    low, high = float(np.min(values)), float(np.max(values))
    margin = padding * (high - low)
    if high - low <= 1e-9 * max(abs(low), abs(high)) or high - low < 1e-200:
        margin = 0.1 * max(abs(low), abs(high)) or 1.0
    margin = max(margin, 1e-150)
    return low - margin, high + margin
