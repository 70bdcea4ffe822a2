"""Writes report.html of a run: accuracies beside baselines, curves, speed, profile, views, config, environment.

Every section says in words what the workdir does not hold, so that a run that was killed, has diverged or has just
begun has a report too.
"""

import pathlib
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from jepa_jax.base.errors import UserError
from jepa_jax.base.selection import SELECTION_KEY
from jepa_jax.base.statistics import accuracy_interval
from jepa_jax.base.text import duration, number, percent, short
from jepa_jax.reports import parts
from jepa_jax.reports.charts import Series, line_chart
from jepa_jax.reports.glossary import glossary
from jepa_jax.reports.page import embed_file, write_page
from jepa_jax.reports.parts import Bar, Card, KeyFigure, Page, Section, Text, absent_section, card_grid, pairs
from jepa_jax.reports.pictures import MAP_NOTE, feature_maps, neighbour_rows
from jepa_jax.reports.profile_section import profile
from jepa_jax.reports.run_files import (
    SUMMARY_ROWS,
    RunFiles,
    elements_of,
    json_pairs,
    probe_gain,
    project_results,
    read_run,
    shown,
)

TRAIN_KEYS = {f"train/{name}" for name in ("loss", "lr", "grad_norm", "update_norm", "probe_loss", "probe_accuracy")}
EVAL_NAMES = {
    "eval/probe_accuracy": "linear probe (test)",
    f"eval/{SELECTION_KEY}": "linear probe (held-out train images)",
    "eval/online_probe_accuracy": "online probe (test)",
    "eval/knn_accuracy": "k-NN (test)",
    "train/probe_accuracy": "online probe (training batch)",
}
STAGES = {"untrained": "Untrained", "final": "Trained"}  # of the arrays in exhibits/collapse.npz
FEWEST_POINTS = 3  # of a curve
# Columns of views.png after the original, by method.
VIEWS = {
    "mae": "the view, and the patches of it that the encoder sees",
    "ijepa": "the view, the patches that the encoder sees, and the blocks whose features are predicted",
    "hjepa": "the view, the patches that the encoder sees, those whose features are predicted, and the coarser levels",
}
PREDICTED = "Each row shows a test image: what is there, what the model sees of it, and what it makes of that."
STATUS_STYLES = {"finished": "good", "interrupted": "warn", "diverged": "bad"}

SectionFunction = Callable[[RunFiles], Section | None]  # None: nothing to say about this run


def write_report(workdir: str | pathlib.Path, *, refresh: int = 0) -> pathlib.Path:
    """Writes `report.html` into the workdir, from the files that are there; returns its path.

    Args:
      refresh: seconds after which a browser loads the page again; 0 = never. Only for a run that is under way.
    """
    workdir = pathlib.Path(workdir)
    if not workdir.is_dir():
        raise UserError(f"workdir = {workdir}: there is no such directory; give the directory of a run")
    run = read_run(workdir)
    page = Page(
        heading=workdir.resolve().name,
        badge=run.status,
        badge_style=STATUS_STYLES.get(run.status, "warn"),
        subtitle=" · ".join(f"{group} {name}" for group, name in run.choices.items() if name),
        sections=[part for section in SECTIONS if (part := _try(section, run)) is not None and part.parts],
        refresh=0 if run.summary else refresh,
    )
    path = workdir / "report.html"
    write_page(path, page)
    return path


def _try(section: SectionFunction, run: RunFiles) -> Section | None:
    # An error in one section must lose neither the other sections nor the run that writes its report.
    try:
        return section(run)
    except Exception as error:
        title = section.__name__.replace("_", " ").capitalize()
        return absent_section(title, f"This part failed: {type(error).__name__}: {error}")


def run_headline(run: RunFiles) -> Section:
    """Returns the most important figures, and what could not be read."""
    seconds, cpu, epochs = map(run.result, ("wall_seconds", "cpu_seconds", "epochs"))
    speed = run.result("images_per_sec") or run.latest("speed/images_per_sec")
    figures = [
        *(project_key_figures(run) or encoder_key_figures(run)),
        KeyFigure("Speed", short(speed), f"{elements_of(run.workdir)} per second"),
        KeyFigure("Time", duration(run.seconds if seconds is None else seconds), f"{duration(cpu)} CPU" if cpu else ""),
        KeyFigure("Steps", short(run.result("steps")), f"{short(epochs)} epochs" if epochs else ""),
    ]
    problems = [parts.absent(text) for text in run.problems.values()]
    if note := run.summary.get("evaluation_note"):
        problems.insert(0, parts.Text(str(note), "warn", "Note"))
    return Section("", [parts.KeyFigures(figures), *([Card("", problems)] if problems else [])])


def project_key_figures(run: RunFiles) -> list[KeyFigure]:
    """Returns the most important figures of a project's run; empty for runs of encoders."""
    return [figure for results in project_results() for figure in results.key_figures(run)]


def start_of(run: RunFiles) -> str:
    """Returns what the encoder before the first step is called."""
    return "Encoder as loaded" if run.choice("model", "init_from") else "Untrained encoder"


def encoder_key_figures(run: RunFiles) -> list[KeyFigure]:
    """Returns the accuracies of the encoder before and after training; without labels, what is known without them."""
    if not run.has_labels:
        ranks = run.metrics.get("collapse/effective_rank", (np.zeros(0), np.zeros(0)))[1]
        before = f"{short(ranks[0], 3)} before training" if len(ranks) else ""
        dimensions = run.latest("collapse/dimensions") or run.result("feature_dim")
        rank = run.result("effective_rank") or run.latest("collapse/effective_rank")
        return [
            KeyFigure("Effective rank", short(rank, 3), f"of {short(dimensions)}; {before}", main=True),
            KeyFigure("Collapse", "yes" if run.summary.get("collapse_warning") else "none", "no labels are needed"),
            KeyFigure("LiDAR", short(run.result("lidar"), 3), "directions that tell images apart"),
            KeyFigure("Alignment", short(run.result("alignment"), 3), "of two views of an image; small is good"),
            KeyFigure("Uniformity", short(run.result("uniformity"), 3), "of all images; far below 0 is good"),
        ]
    gained, features = probe_gain(run.summary), run.result("feature_dim")
    gain = "" if gained is None else f"; {gained:+.1f} points"
    probed = run.result("probe_accuracy") is not None
    note = with_interval("linear probe", run, "probe_accuracy") + gain if probed else "not measured yet"
    return [
        KeyFigure("Trained encoder", percent(run.result("probe_accuracy")), note, main=True),
        KeyFigure(start_of(run), percent(run.result("untrained_probe_accuracy")), "linear probe before step 1"),
        KeyFigure("k-NN", percent(run.accuracy("knn_accuracy")), f"{short(features)} dimensions" if features else ""),
    ]


def with_interval(what: str, run: RunFiles, key: str) -> str:
    """Returns what an accuracy is, with its 95 % interval and the number of test images where they are known."""
    value, tested = run.result(key), run.result("probe_test_images")
    if value is None or not tested:
        return what
    low, high = accuracy_interval(value, int(tested))
    return f"{what}, {low:.1f} to {high:.1f} (95 %, {short(tested)} images)"


def accuracy(run: RunFiles) -> Section | None:
    """Returns bars of this run's accuracies, of its baselines, and of published accuracies."""
    if project_key_figures(run) or not run.has_labels:
        return None
    images, classes = run.result("probe_train_images"), run.result("num_classes")
    many = "1 class" if classes == 1 else f"{short(classes)} classes"
    note = f"fitted on {short(images)} images" if images else "test accuracy after training"
    baselines = run.summary.get("baselines")
    published = baselines.items() if isinstance(baselines, dict) else ()
    groups = {
        "This run": [
            Bar("Linear probe", run.accuracy("probe_accuracy"), "main", with_interval(note, run, "probe_accuracy")),
            Bar("Online probe", run.accuracy("online_probe_accuracy"), "run", "trained along with the encoder"),
            Bar(
                "k-NN",
                run.accuracy("knn_accuracy"),
                "run",
                with_interval("vote of the nearest images", run, "knn_accuracy"),
            ),
        ],
        "To beat": [
            Bar(
                start_of(run),
                run.result("untrained_probe_accuracy"),
                "baseline",
                with_interval("linear probe", run, "untrained_probe_accuracy"),
            ),
            Bar("Chance", run.result("chance_accuracy"), "baseline", many),
        ],
        "Published or measured elsewhere, without this encoder": [
            Bar(str(name), number(value), "baseline") for name, value in published
        ],
    }
    if all(bar.value is None for title in ("This run", "To beat") for bar in groups[title]):
        one_class = "All images are of one class: no accuracy is measured."
        return absent_section("Accuracy", one_class if classes == 1 else "No accuracy has been measured yet.")
    measured = {title: [bar for bar in bars if bar.value is not None] for title, bars in groups.items()}
    missing = ", ".join(bar.label for bars in groups.values() for bar in bars if bar.value is None)
    return Section("Accuracy", [Card("", [parts.Bars(measured)], f"Not measured: {missing}." if missing else "")])


def project_section(run: RunFiles) -> Section | None:
    """Returns the section of the project whose figures the run has."""
    return next((section for results in project_results() if (section := results.section(run)) is not None), None)


def _chart(run: RunFiles, title: str, names: Iterable[tuple[str, str]], **options: Any) -> Card | None:
    """Returns a chart of the metrics that there are; `names` gives their keys and names."""
    series = [Series(name, *run.metrics[key]) for key, name in names if key in run.metrics]
    epoch = None if run.epochs_per_step is None else ("epoch", run.epochs_per_step)
    return line_chart(title, series, per_x=epoch, **options) if series else None


def curves(run: RunFiles) -> Section:
    """Returns charts of the loss and its terms, learning rate, norms and accuracies over the steps."""
    if not run.metrics:
        return absent_section("Curves", run.problems.get("metrics.jsonl", "No metric was recorded."))
    terms = sorted(key for key in run.metrics if key.startswith("train/") and key not in TRAIN_KEYS)
    of_projects = {title: names for results in project_results() for title, names in results.charts.items()}
    charted = EVAL_NAMES.keys() | {key for names in of_projects.values() for key in names}
    others = sorted(
        key for key, (steps, _) in run.metrics.items()
        if key.startswith("eval/") and key not in charted and len(steps) > 1
    )  # fmt: skip
    longest = max(len(steps) for steps, _ in run.metrics.values())
    if longest < FEWEST_POINTS:
        rows = [
            [key, *(short(value) if np.isfinite(value) else "not finite" for value in values)]
            for key, (_, values) in sorted(run.metrics.items())
            if "train/" in key
        ]
        note = f"Metrics were logged {longest} times (log.every_steps): too few for curves."
        return Section("Curves", [Card("", [parts.Table(rows, ["metric", *[""] * longest])], note)])
    floors = {"untrained": run.result("untrained_probe_accuracy"), "chance": run.result("chance_accuracy")}
    levels = [(f"{name} {value:.1f} %", value) for name, value in floors.items() if value is not None]
    norms = [("train/grad_norm", "gradient"), ("train/update_norm", "update")]
    term_names = [(key, key.removeprefix("train/")) for key in terms]
    charts = [
        _chart(run, "Accuracy", EVAL_NAMES.items(), y_label="%", levels=levels, smooth=True, wide=True),
        _chart(run, "Loss", [("train/loss", "loss")], log="offer", smooth=True),
        _chart(run, "Terms of the loss", term_names, log="offer", smooth=True),
        _chart(run, "Learning rate", [("train/lr", "learning rate")], log="offer", from_zero=True),
        _chart(run, "Norms", norms, log="offer", smooth=True),
        _chart(run, "Loss of the online probe", [("train/probe_loss", "probe loss")], log="offer", smooth=True),
        *(_chart(run, title, names.items(), from_zero=True, wide=True) for title, names in of_projects.items()),
        *(_chart(run, key.removeprefix("eval/"), [(key, key)]) for key in others),
    ]
    return Section("Curves", [card_grid(charts)])


def speed(run: RunFiles) -> Section:
    """Returns charts of the throughput and of the share of time that the device waited for data."""
    rate = f"{elements_of(run.workdir).capitalize()} per second"
    names = {"speed/images_per_sec": rate, "speed/data_wait_percent": "Waiting for data"}
    extra = sorted(key for key in run.metrics if key.startswith("speed/") and key not in names)
    charts = []
    logged = max((len(run.metrics[key][0]) for key in run.metrics if key.startswith("speed/")), default=0)
    if 0 < logged < FEWEST_POINTS:
        return absent_section("Speed", f"Logged {logged} times (log.every_steps): too few for curves.")
    for key in [*names, *extra]:
        title = names.get(key, key.removeprefix("speed/").replace("_", " "))
        unit = "% of the time" if key.endswith("percent") else ""
        charts.append(_chart(run, title, [(key, title.lower())], y_label=unit, from_zero=True, smooth=True))
    if not any(charts):
        return absent_section("Speed", "No speed was recorded.")
    return Section("Speed", [card_grid(charts)])


def views(run: RunFiles) -> Section | None:
    """Returns the picture of augmented views, or of masks, and what the model makes of test images if it draws them."""
    if project_key_figures(run) and not (run.workdir / "views.png").exists():
        return None
    columns = VIEWS.get(run.choice("method", "name"), "its augmented views")
    picture = embed_file(run.workdir / "views.png", f"Rows of images: the original, then {columns}")
    cards = [Card("", [picture], f"Each row shows one image: the original, then {columns}.")]
    drawn = sorted((run.workdir / "pictures").glob("step_*.png"))
    for path in dict.fromkeys([*drawn[:1], *drawn[-1:]]):
        step = int(path.stem.partition("_")[2])
        cards.append(Card(f"After step {step:,}", [embed_file(path, f"Pictures of step {step}")], PREDICTED))
    return Section("What the encoder sees", cards)


def config(run: RunFiles) -> Section:
    if not run.config:
        return absent_section("Config", run.problems["config.json"])
    groups = {key: value for key, value in run.config.items() if isinstance(value, dict)}
    top = {key: value for key, value in run.config.items() if not isinstance(value, dict)}
    blocks = []
    for name, group in (groups | {"other keys": top} if top else groups).items():
        rows = json_pairs(group)
        blocks.append(parts.Details(name, [pairs(rows)], " · ".join(f"{key} {value}" for key, value in rows[:4])))
    return Section("Config", [parts.Grid(blocks, "columns")])


def environment_table(run: RunFiles) -> Section:
    if not run.environment:
        return absent_section("Environment", run.problems["environment.json"])
    return Section("Environment", [Card("", [pairs(json_pairs(run.environment))])])


def summary(run: RunFiles) -> Section:
    if not run.summary:
        return absent_section("Summary", f"{run.problems['summary.json']} A run writes it when it ends.")
    known = [
        (label, shown(run.summary[key], show)) for key, (label, show) in SUMMARY_ROWS.items() if key in run.summary
    ]
    hidden = {*SUMMARY_ROWS, "baselines", "evaluation_note"}
    rest = {key: value for key, value in run.summary.items() if key not in hidden and value not in (None, {}, [])}
    return Section("Summary", [Card("", [pairs([*known, *json_pairs(rounded(rest))])])])


def rounded(value: Any) -> Any:
    """Returns JSON with floats of six digits, for people."""
    if isinstance(value, dict):
        return {key: rounded(part) for key, part in value.items()}
    return float(f"{value:.6g}") if isinstance(value, float) else value


def neighbours(run: RunFiles) -> Section | None:
    """Returns some test images with those that the encoder takes for most alike, trained beside untrained."""
    path = run.workdir / "exhibits" / "collapse.npz"
    if not path.exists():
        return None
    with np.load(path) as stored:
        shown = {title: stored[stage] for stage, title in STAGES.items() if stage in stored}
        maps = {
            f"{title} encoder": stored[f"{stage}_map"] for stage, title in STAGES.items() if f"{stage}_map" in stored
        }
        known = {name: stored[name] for name in ("mapped", "mapped_labels", "classes") if name in stored}
    cards = [Card(f"{title} encoder", [neighbour_rows(rows, title)]) for title, rows in shown.items()]
    note = (
        "Each row: an image, then the five images whose features are nearest to its own. A good encoder puts "
        "alike things beside each other; an untrained one goes by colour."
    )
    shown_parts: list[parts.Part] = [Text(note, "sub"), card_grid(cards)]
    if maps:
        drawn = feature_maps(
            known["mapped"], maps, known.get("mapped_labels"), known.get("classes", np.array(())).tolist()
        )
        shown_parts += [Text(MAP_NOTE, "sub"), drawn]
    return Section("Nearest neighbours", shown_parts)


def meanings(run: RunFiles) -> Section:
    if project_key_figures(run):
        return Section("", [])
    labels = ["Speed", "Effective rank", "LiDAR", "Collapse", "Alignment", "Uniformity", "MFU"]
    return glossary(labels + (["Linear probe", "Online probe", "Held-out", "k-NN", "Chance"] if run.has_labels else []))


SECTIONS = (
    run_headline, accuracy, project_section, neighbours, curves, speed, profile, views, config, summary,
    environment_table, meanings,
)  # fmt: skip
