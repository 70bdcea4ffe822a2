"""eval.json as a Markdown table and as one self-contained HTML page."""

import base64
import json
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from jepa_jax.reports import html
from jepa_jax.reports.charts import Bar, Series, bars, line_chart
from jepa_jax.reports.html import Section

Record = Mapping[str, Any]
NONE = "–"


def level_name(level: str | int) -> str:
    return f"level {level}"


def _probe(key: str) -> Callable[[Record], str]:
    return lambda result: html.percent(result["linear_probe"][key])


def _shot(shot: str) -> Callable[[Record], str]:
    def text(result):
        figures = result["few_shot"]["shots"][shot]
        return f"{figures['accuracy']:.1f} ± {figures['interval_95']:.1f} %"

    return text


def _quality(key: str, digits: int = 3) -> Callable[[Record], str]:
    return lambda result: html.short(result["feature_quality"][key], digits)


def _chosen_knn(result: Record) -> str:
    knn = result["knn"]
    return f"{knn['accuracy']:.1f} % (k {knn['k']}, T {knn['temperature']:g})"


def _fine_tuned(result: Record) -> str:
    tuned = result["fine_tune"]
    return f"{tuned['accuracy']:.1f} % (epoch {tuned['epoch']} of {tuned['epochs']})"


def _rank(result: Record) -> str:
    quality = result["feature_quality"]
    return f"{quality['effective_rank']:.1f} of {quality['dimensions']:.0f}"


# What it is -> how a level's results give it; a row that no level has is left out.
ROWS: dict[str, Callable[[Record], str]] = {
    "Linear probe, top-1": _probe("accuracy"),
    "Linear probe, top-5": _probe("top5_accuracy"),
    "k-NN, k 20, T 0.07": lambda result: html.percent(result["knn"]["fixed_accuracy"]),
    "k-NN, k and T chosen": _chosen_knn,
    "Fine-tuned": _fine_tuned,
    "Few-shot, 1 example": _shot("1"),
    "Few-shot, 5 examples": _shot("5"),
    "Few-shot, 10 examples": _shot("10"),
    "Effective rank": _rank,
    "Rank ratio": _quality("rank_ratio"),
    "Components for 99 % of the variance": _quality("components_99"),
    "RankMe": _quality("rankme"),
    "LiDAR": _quality("lidar"),
    "alpha-ReQ": _quality("alpha_req"),
    "Variance per dimension, mean": _quality("variance_mean"),
    "Variance per dimension, smallest": _quality("variance_min"),
    "Mean absolute correlation": _quality("mean_abs_correlation"),
    "Relative spread, before normalisation": lambda result: html.short(
        result["feature_quality"]["raw"]["relative_spread"], 3
    ),
    "Collapse": lambda result: result["feature_quality"]["collapse"] or "none",
}


def table_rows(record: Record) -> list[list[str]]:
    """Label and a text for each level; rows without any figure are left out."""
    rows = []
    for label, show in ROWS.items():
        cells = []
        for result in record["levels"].values():
            try:
                cells.append(show(result))
            except (KeyError, TypeError):
                cells.append(NONE)
        if set(cells) != {NONE}:
            rows.append([label, *cells])
    return rows


def table_markdown(record: Record) -> str:
    """A heading, the table, and how the figures were made."""
    levels = [level_name(level) for level in record["levels"]]
    lines = [
        f"# {record['method']}, {record['model']}, {record['data']}: step {record['step']:,}",
        "",
        f"| | {' | '.join(levels)} |",
        f"|---|{'---:|' * len(levels)}",
        *(f"| {' | '.join(row)} |" for row in table_rows(record)),
        "",
        f"{record['train_images']:,} train and {record['test_images']:,} test images, unaugmented. "
        f"Choices were made on {record['choices_made_on']}.",
    ]
    few_shot = next((result["few_shot"] for result in record["levels"].values() if "few_shot" in result), None)
    if few_shot:
        lines.append(
            f"Few-shot: {few_shot['ways']} classes, {few_shot['episodes']} episodes of test images, nearest centroid, "
            "95 % interval."
        )
    return "\n".join(lines) + "\n"


def page(record: Record, folder: pathlib.Path) -> str:
    """The page of one evaluation; figures are read from `folder` and embedded."""
    name = folder.resolve().parent.name
    facts = f"{record['method']} · {record['model']} · {record['data']} · step {record['step']:,}"
    weights = "weights of the EMA target" if record["weights"] == "target" else "weights as trained"
    header = (
        f'<h1>{html.escape(name)}<span class="pill">evaluation</span></h1>'
        f'<p class="sub">{html.escape(f"{facts} · {weights}")}</p>'
    )
    sections: list[Section | None] = [headline(record, folder), accuracies(record), table(record)]
    sections += [level_figures(record, folder, level) for level in record["levels"]]
    sections += [spectra(record), patches(folder)]
    footer = f"Written {html.escape(record['written'])}."
    return html.page(f"{name} · evaluation · jepa_jax", header, [s for s in sections if s is not None], footer)


def headline(record: Record, folder: pathlib.Path) -> Section:
    """The figures of the best level, and any collapse in words."""

    def best(protocol, key):
        values = [
            (value, level)
            for level, result in record["levels"].items()
            if (value := html.number(result.get(protocol, {}).get(key))) is not None
        ]
        return max(values) if values else (None, "")

    several = len(record["levels"]) > 1
    untrained = html.number(read_object(folder.parent / "summary.json").get("untrained_probe_accuracy"))
    figures = []
    for kind, label, protocol, key, note in (
        ("main", "Linear probe", "linear_probe", "accuracy", "test accuracy"),
        ("", "k-NN", "knn", "fixed_accuracy", "k 20, T 0.07"),
        ("", "Fine-tuned", "fine_tune", "accuracy", "whole encoder"),
    ):
        value, level = best(protocol, key)
        if value is not None:
            if protocol == "linear_probe" and untrained is not None:
                note = f"{value - untrained:+.1f} points over untrained"
            figures.append((kind, label, html.percent(value), f"{note}, level {level}" if several else note))
    shots = [result["few_shot"]["shots"].get("5") for result in record["levels"].values() if "few_shot" in result]
    if shots := [shot for shot in shots if shot]:
        shot = max(shots, key=lambda s: s["accuracy"])
        figures.append(("", "Few-shot", html.percent(shot["accuracy"]), f"± {shot['interval_95']:.1f}, 5 examples"))
    rank, level = best("feature_quality", "effective_rank")
    if rank is not None:
        dimensions = record["levels"][level]["feature_quality"]["dimensions"]
        figures.append(("", "Effective rank", html.short(rank, 3), f"of {dimensions:.0f} dimensions"))
    warnings = [
        f"{level_name(level)}: {result['feature_quality']['collapse']}."
        for level, result in record["levels"].items()
        if result.get("feature_quality", {}).get("collapse")
    ]
    body = html.figures(figures)
    if warnings:
        listed = "".join(f"<p>{html.escape(text)}</p>" for text in warnings)
        body += html.card("Collapsed", listed)
    return Section("", body)


def accuracies(record: Record) -> Section:
    """Bars of every accuracy, level by level."""
    groups: dict[str, list[Bar]] = {}
    for level, result in record["levels"].items():
        items = []
        if "linear_probe" in result:
            items.append(Bar("Linear probe", result["linear_probe"]["accuracy"], "main", "frozen encoder"))
        if "knn" in result:
            items.append(Bar("k-NN", result["knn"]["fixed_accuracy"], "run", "k 20, T 0.07"))
            note = f"chosen: k {result['knn']['k']}, T {result['knn']['temperature']:g}"
            items.append(Bar("k-NN", result["knn"]["accuracy"], "run", note))
        if "fine_tune" in result:
            items.append(Bar("Fine-tuned", result["fine_tune"]["accuracy"], "main", "encoder and head"))
        for shot, figures in result.get("few_shot", {}).get("shots", {}).items():
            note = f"{result['few_shot']['ways']}-way, ± {figures['interval_95']:.1f}"
            items.append(Bar(f"Few-shot, {shot}", figures["accuracy"], "run", note))
        if items:
            groups[level_name(level).capitalize() if len(record["levels"]) > 1 else "Test accuracy"] = items
    return Section("Accuracy", html.card("", bars(groups) if groups else html.absent("No accuracy was measured.")))


def table(record: Record) -> Section:
    levels = [level_name(level) for level in record["levels"]]
    note = (
        f"{record['train_images']:,} train and {record['test_images']:,} test images, unaugmented. Choices were made "
        f"on {record['choices_made_on']}."
    )
    return Section("Figures", html.card("", html.table(table_rows(record), ("", *levels)), note))


def level_figures(record: Record, folder: pathlib.Path, level: str) -> Section | None:
    """Pictures and the fine-tuning curve of one level."""
    result = record["levels"][level]
    cards = [
        _picture(folder / f"confusion_level{level}.png", "Confusion matrix of the linear probe"),
        _picture(folder / f"knn_level{level}.png", "k-NN over k and temperature", "Framed: the pair that was chosen."),
        _picture(folder / f"scatter_level{level}.png", "Features of test images", wide=True),
    ]
    if "fine_tune" in result:
        tuned = result["fine_tune"]
        scores = [tuned["start_accuracy"], *tuned["held_out_accuracies"]]
        series = [Series("held-out accuracy", list(range(len(scores))), scores)]
        cards.append(line_chart("Fine-tuning", series, x_label="epoch", y_label="% of held-out images", wide=True))
    cards = [card for card in cards if card]
    title = "Pictures" if len(record["levels"]) == 1 else level_name(level).capitalize()
    return Section(title, html.grid(cards)) if cards else None


def spectra(record: Record) -> Section | None:
    """Singular values over their rank, a line a level."""
    series = []
    for level, result in record["levels"].items():
        values = result.get("feature_quality", {}).get("spectrum")
        if values:
            series.append(Series(level_name(level), list(range(1, len(values) + 1)), values))
    if not series:
        return None
    chart = line_chart("Singular values of centred features", series, x_label="component", x_log=True, log="first")
    return Section("Spectrum", chart)


def patches(folder: pathlib.Path) -> Section | None:
    note = "Colours: the three principal components of the patch features of these images together."
    card = _picture(folder / "patches.png", "Test images and their patch features", note)
    return Section("Patches", card) if card else None


def _picture(path: pathlib.Path, title: str, note: str = "", wide: bool = False) -> str:
    """A card with an embedded PNG, or nothing where there is none."""
    if not path.exists():
        return ""
    data = base64.b64encode(path.read_bytes()).decode()
    style = "width:100%;max-width:900px;height:auto;border-radius:6px;display:block;margin:0 auto"
    image = f'<img alt="{html.escape(title)}" style="{style}" src="data:image/png;base64,{data}">'
    return html.card(title, image, note, wide=wide)


def read_object(path: pathlib.Path) -> dict[str, Any]:
    """A JSON object; empty when the file is not there or not one."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
