"""report.html of a run: what was learned beside its baselines, curves, speed, views, config, environment.

Every part reads what the workdir holds and says in words what it does not: a report of a run that was killed, has
diverged or has just begun is still a report.
"""

import dataclasses
import datetime
import json
import pathlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from jepa_jax.base.errors import UserError
from jepa_jax.base.files import write_atomically
from jepa_jax.reports import html
from jepa_jax.reports.charts import Bar, Series, bars, line_chart
from jepa_jax.reports.html import Section
from jepa_jax.reports.profile_report import profile

TRAIN_KEYS = {f"train/{name}" for name in ("loss", "lr", "grad_norm", "update_norm", "probe_loss", "probe_accuracy")}
EVAL_NAMES = {
    "eval/probe_accuracy": "linear probe (test)",
    "eval/online_probe_accuracy": "online probe (test)",
    "eval/knn_accuracy": "k-NN (test)",
    "train/probe_accuracy": "online probe (training batch)",
}
SPEED_NAMES = {"speed/images_per_sec": "Images a second", "speed/data_wait_percent": "Waiting for data"}
STATUS = {"finished": "good", "interrupted": "warn", "diverged": "bad"}
# Key of summary.json -> what it is, how it is shown.
SUMMARY_ROWS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "status": ("Status", str),
    "probe_accuracy": ("Linear probe, test accuracy", html.percent),
    "untrained_probe_accuracy": ("The same of the untrained encoder", html.percent),
    "knn_accuracy": ("k-NN, test accuracy", html.percent),
    "untrained_knn_accuracy": ("k-NN of the untrained encoder", html.percent),
    "online_probe_accuracy": ("Online probe, test accuracy", html.percent),
    "feature_dim": ("Numbers a feature vector", html.short),
    "num_classes": ("Classes", html.short),
    "probe_train_images": ("Images the probe learned from", html.short),
    "probe_test_images": ("Images it was tested on", html.short),
    "steps": ("Steps", html.short),
    "epochs": ("Epochs", html.short),
    "images_per_sec": ("Images a second", html.short),
    "wall_seconds": ("Time", html.duration),
    "cpu_seconds": ("CPU time, user + system", html.duration),
    "peak_memory_bytes": ("Peak memory", lambda value: _bytes(value)),
    "compilations": ("Compilations", html.short),
    "params_sha256": ("SHA-256 of the parameters", str),
}


@dataclasses.dataclass(frozen=True)
class RunFiles:
    """What a workdir holds, read; a file that is absent or broken is empty here and named in `problems`."""

    workdir: pathlib.Path
    config: Mapping[str, Any]
    summary: Mapping[str, Any]
    environment: Mapping[str, Any]
    metrics: Mapping[str, tuple[np.ndarray, np.ndarray]]  # key -> steps, values (NaN where not finite)
    epochs_per_step: float | None
    seconds: float | None  # since the start, of the last row
    problems: Mapping[str, str]

    def latest(self, key: str) -> float | None:
        """The last finite value of a metric."""
        _, values = self.metrics.get(key, (None, np.zeros(0)))
        finite = values[np.isfinite(values)]
        return float(finite[-1]) if len(finite) else None

    def accuracy(self, name: str) -> float | None:
        """An accuracy of the summary, or its last value in the metrics while there is no summary."""
        value = html.number(self.summary.get(name))
        return self.latest(f"eval/{name}") if value is None else value


SectionFunction = Callable[[RunFiles], Section]


def write_report(workdir: str | pathlib.Path, sections: Iterable[SectionFunction] | None = None) -> pathlib.Path:
    """Writes `report.html` into the workdir, from the files that are there; returns its path."""
    workdir = pathlib.Path(workdir)
    if not workdir.is_dir():
        raise UserError(f"workdir = {workdir}: there is no such directory; give the directory of a run")
    run = read_run(workdir)
    parts = [_draw(section, run) for section in (SECTIONS if sections is None else sections)]
    name = workdir.resolve().name
    written = datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")
    path = workdir / "report.html"
    write_atomically(path, html.page(f"{name} · jepa_jax", _title(run, name), parts, f"Written {written}."))
    return path


def _draw(section: SectionFunction, run: RunFiles) -> Section:
    # A report is written after hours of training: one part that fails must not take the others, or the run, with it.
    try:
        return section(run)
    except Exception as error:
        title = section.__name__.replace("_", " ").capitalize()
        return Section(title, html.card("", html.absent(f"This part failed: {type(error).__name__}: {error}")))


def read_run(workdir: pathlib.Path) -> RunFiles:
    """Reads a workdir; nothing that is missing or broken raises."""
    problems: dict[str, str] = {}
    config, summary, environment = (
        _read_object(workdir / name, problems) for name in ("config.json", "summary.json", "environment.json")
    )
    rows = _read_rows(workdir / "metrics.jsonl", problems)
    clock = [(html.number(row["step"]), html.number(row.get("epoch")), html.number(row.get("time"))) for row in rows]
    rates = [epoch / step for step, epoch, _ in clock if step and epoch]
    times = [time for _, _, time in clock if time is not None]
    return RunFiles(
        workdir=workdir,
        config=config,
        summary=summary,
        environment=environment,
        metrics=collect_metrics(rows),
        epochs_per_step=rates[-1] if rates else None,
        seconds=times[-1] if times else None,
        problems=problems,
    )


def collect_metrics(rows: Iterable[Mapping[str, Any]]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Sparse rows -> key: (steps in order, values); where a resumed run repeats a step, the later value counts."""
    columns: dict[str, dict[float, float]] = {}
    for row in rows:
        step = float(row["step"])
        for key, value in row.items():
            if "/" not in key or isinstance(value, list | dict | bool):
                continue
            value = html.number(value)
            columns.setdefault(key, {})[step] = np.nan if value is None else value
    return {
        key: (np.array(sorted(points), np.float64), np.array([points[s] for s in sorted(points)], np.float64))
        for key, points in columns.items()
    }


def _read_text(path: pathlib.Path, problems: dict[str, str]) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        problems[path.name] = f"{path.name} has not been written."
    except OSError as error:
        problems[path.name] = f"{path.name} cannot be read: {error.strerror}."
    return None


def _read_object(path: pathlib.Path, problems: dict[str, str]) -> dict[str, Any]:
    text = _read_text(path, problems)
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        problems[path.name] = f"{path.name} is not a JSON object: it may have been cut off."
        return {}
    return value


def _read_rows(path: pathlib.Path, problems: dict[str, str]) -> list[dict[str, Any]]:
    rows, broken = [], 0
    for line in (_read_text(path, problems) or "").splitlines():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if isinstance(row, dict) and html.number(row.get("step")) is not None:
            rows.append(row)
        elif line.strip():
            broken += 1
    if broken:
        problems[path.name] = f"{broken:,} lines of {path.name} were left out: not JSON, or without a step."
    elif not rows and path.name not in problems:
        problems[path.name] = f"{path.name} is empty."
    return rows


def _title(run: RunFiles, name: str) -> str:
    status = str(run.summary.get("status") or ("finished" if run.summary else "not finished"))
    config = run.config
    facts = [
        f"{group} {config[group][key]}"
        for group, key in (("method", "name"), ("model", "name"), ("data", "source"))
        if isinstance(config.get(group), dict) and config[group].get(key)
    ]
    return (
        f'<h1>{html.escape(name)}<span class="pill {STATUS.get(status, "warn")}">{html.escape(status)}</span></h1>'
        f'<p class="sub">{html.escape(" · ".join(facts) or "A run of jepa_jax")}</p>'
    )


def headline(run: RunFiles) -> Section:
    """The figures a reader came for."""
    summary = run.summary
    names = (
        "probe_accuracy",
        "untrained_probe_accuracy",
        "wall_seconds",
        "cpu_seconds",
        "steps",
        "epochs",
        "feature_dim",
    )
    trained, untrained, seconds, cpu, steps, epochs, features = (html.number(summary.get(name)) for name in names)
    gain = "" if trained is None or untrained is None else f"{trained - untrained:+.1f} points, linear probe"
    speed = html.number(summary.get("images_per_sec")) or run.latest("speed/images_per_sec")
    knn, time = run.accuracy("knn_accuracy"), run.seconds if seconds is None else seconds
    figures = [
        ("main", "Trained encoder", html.percent(trained), gain or "not measured yet"),
        ("", "Untrained encoder", html.percent(untrained), "linear probe before step 1"),
        ("", "k-NN", html.percent(knn), f"on {html.short(features)} numbers" if features else ""),
        ("", "Speed", html.short(speed), "images a second"),
        ("", "Time", html.duration(time), f"{html.duration(cpu)} CPU" if cpu else ""),
        ("", "Steps", html.short(steps), f"{html.short(epochs)} epochs" if epochs else ""),
    ]
    problems = "".join(html.absent(text) for text in run.problems.values())
    return Section("", html.figures(figures) + (html.card("", problems) if problems else ""))


def chance(run: RunFiles) -> float | None:
    """Percent that guessing gets right."""
    classes = html.number(run.summary.get("num_classes"))
    return 100 / classes if classes and classes >= 1 else None


def accuracy(run: RunFiles) -> Section:
    """Bars: this run, what it has to beat, what others published."""
    summary = run.summary
    probe_images = html.number(summary.get("probe_train_images"))
    note = f"fitted on {html.short(probe_images)} images" if probe_images else "test accuracy after training"
    candidates = [
        Bar("Linear probe", run.accuracy("probe_accuracy"), "main", note),
        Bar("Online probe", run.accuracy("online_probe_accuracy"), "run", "learned along with the encoder"),
        Bar("k-NN", run.accuracy("knn_accuracy"), "run", "no parameters"),
    ]
    untrained = html.number(summary.get("untrained_probe_accuracy"))
    floors = [Bar("Untrained encoder", untrained, "baseline", "linear probe")]
    floors.append(Bar("Chance", chance(run), "baseline", f"{html.short(summary.get('num_classes'))} classes"))
    baselines = summary.get("baselines")
    published = [
        Bar(str(name), html.number(value), "baseline")
        for name, value in (baselines.items() if isinstance(baselines, dict) else ())
    ]
    if all(bar.value is None for bar in candidates + floors):
        return Section("Accuracy", html.card("", html.absent("No accuracy has been measured yet.")))
    measured = {
        "This run": [bar for bar in candidates if bar.value is not None],
        "To beat": [bar for bar in floors if bar.value is not None],
        "Published or measured elsewhere, without this encoder": [bar for bar in published if bar.value is not None],
    }
    missing = [bar.label for bar in candidates + floors + published if bar.value is None]
    return Section("Accuracy", html.card("", bars(measured), f"Not measured: {', '.join(missing)}." if missing else ""))


def curves(run: RunFiles) -> Section:
    """Loss and its terms, learning rate, gradient norm and accuracies over the steps."""
    if not run.metrics:
        words = run.problems.get("metrics.jsonl", "No metric was recorded.")
        return Section("Curves", html.card("", html.absent(words)))
    epoch = None if run.epochs_per_step is None else ("epoch", run.epochs_per_step)

    def chart(title, names, **options):
        series = [Series(name, *run.metrics[key]) for key, name in names if key in run.metrics]
        return line_chart(title, series, per_x=epoch, **options) if series else ""

    terms = sorted(key for key in run.metrics if key.startswith("train/") and key not in TRAIN_KEYS)
    others = sorted(key for key in run.metrics if key.startswith("eval/") and key not in EVAL_NAMES)
    floors = {"untrained": html.number(run.summary.get("untrained_probe_accuracy")), "chance": chance(run)}
    levels = [(f"{name} {value:.1f} %", value) for name, value in floors.items() if value is not None]
    charts = [
        chart("Accuracy", EVAL_NAMES.items(), y_label="%", levels=levels, smooth=True, wide=True),
        chart("Loss", [("train/loss", "loss")], log="offer", smooth=True),
        chart("Terms of the loss", [(key, key.removeprefix("train/")) for key in terms], log="offer", smooth=True),
        chart("Learning rate", [("train/lr", "learning rate")], log="offer", from_zero=True),
        chart("Norms", [("train/grad_norm", "gradient"), ("train/update_norm", "update")], log="offer", smooth=True),
        chart("Loss of the online probe", [("train/probe_loss", "probe loss")], log="offer", smooth=True),
        *(chart(key.removeprefix("eval/"), [(key, key)]) for key in others),
    ]
    return Section("Curves", html.grid(charts))


def speed(run: RunFiles) -> Section:
    """Throughput and the share of time the device waited for data."""
    extra = sorted(key for key in run.metrics if key.startswith("speed/") and key not in SPEED_NAMES)
    keys = [key for key in [*SPEED_NAMES, *extra] if key in run.metrics]
    if not keys:
        return Section("Speed", html.card("", html.absent("No speed was recorded.")))
    epoch = None if run.epochs_per_step is None else ("epoch", run.epochs_per_step)
    charts = []
    for key in keys:
        title = SPEED_NAMES.get(key, key.removeprefix("speed/").replace("_", " "))
        unit = "% of the time" if key.endswith("percent") else ""
        series = [Series(title.lower(), *run.metrics[key])]
        charts.append(line_chart(title, series, y_label=unit, from_zero=True, smooth=True, per_x=epoch))
    return Section("Speed", html.grid(charts))


def views(run: RunFiles) -> Section:
    """The grid of augmented views."""
    path = run.workdir / "views.png"
    try:
        picture = html.image(path, "Rows of images: the original and its augmented views")
    except FileNotFoundError:
        picture = html.absent("views.png has not been written: the run shows no augmented views.")
    except OSError as error:
        picture = html.absent(f"views.png cannot be read: {error}.")
    note = "A row an image: first the original, then its augmented views."
    return Section("What the encoder sees", html.card("", picture, note))


def config(run: RunFiles) -> Section:
    """Every key of the config, by group."""
    if not run.config:
        return Section("Config", html.card("", html.absent(run.problems.get("config.json", "config.json is empty."))))
    groups = {key: value for key, value in run.config.items() if isinstance(value, dict)}
    top = {key: value for key, value in run.config.items() if not isinstance(value, dict)}
    blocks = []
    for name, group in (groups | {"other keys": top} if top else groups).items():
        rows = list(flatten(group))
        preview = " · ".join(f"{key} {value}" for key, value in rows[:4])
        blocks.append(html.details(name, _pairs(rows), preview))
    return Section("Config", f'<div class="columns">{"".join(blocks)}</div>')


def flatten(group: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    """Leaves of a nested dict as (dotted key, value as JSON writes it)."""
    for key, value in group.items():
        if isinstance(value, dict) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value if isinstance(value, str) and value else json.dumps(value, default=str)


def environment(run: RunFiles) -> Section:
    """Versions, devices, processor, command line."""
    if not run.environment:
        words = run.problems.get("environment.json", "environment.json is empty.")
        return Section("Environment", html.card("", html.absent(words)))
    return Section("Environment", html.card("", _pairs(flatten(run.environment))))


def summary_table(run: RunFiles) -> Section:
    """Everything summary.json says."""
    if not run.summary:
        words = run.problems.get("summary.json", "summary.json is empty.")
        return Section("Summary", html.card("", html.absent(f"{words} A run writes it when it ends.")))
    known = [
        (label, show(run.summary[key]) if run.summary[key] is not None else "–")
        for key, (label, show) in SUMMARY_ROWS.items() if key in run.summary
    ]  # fmt: skip
    rest = {key: value for key, value in run.summary.items() if key not in SUMMARY_ROWS and key != "baselines"}
    return Section("Summary", html.card("", _pairs([*known, *flatten(rest)])))


def _pairs(rows: Iterable[tuple[str, str]]) -> str:
    return f'<div class="pairs">{html.table(rows)}</div>'


def _bytes(value: Any) -> str:
    value = html.number(value)
    if value is None:
        return "–"
    return f"{value / 2**30:.2f} GiB" if value >= 2**30 else f"{value / 2**20:.0f} MiB"


SECTIONS: list[SectionFunction] = [
    headline, accuracy, curves, speed, profile, views, config, summary_table, environment,
]  # fmt: skip
