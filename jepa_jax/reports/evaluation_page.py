"""The results of an evaluation: eval.json, eval.md, eval.html and figures, in `eval/` of a workdir."""

import io
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jepa_jax.base.files import write_atomically
from jepa_jax.base.text import number, percent, short
from jepa_jax.data.pictures import grid, png
from jepa_jax.evals.evaluate import Evaluation, Examples
from jepa_jax.evals.features import Split
from jepa_jax.evals.neighbours import pca
from jepa_jax.reports import parts
from jepa_jax.reports.charts import Series, heat_map, line_chart, scatter_chart
from jepa_jax.reports.glossary import glossary
from jepa_jax.reports.page import embed_file, write_figure, write_page
from jepa_jax.reports.pictures import feature_maps
from jepa_jax.reports.tables import markdown_table

ATTENTION = "attention.png"
PERPLEXITY = 30.0
TSNE_COMPONENTS = 50  # principal components keep the relevant distances and make them cheap

Record = Mapping[str, Any]  # what eval.json holds
LevelResults = Mapping[str, Any]  # protocol -> its results, at one level

Row = Callable[[LevelResults], str]  # a text from the results of a level; raises KeyError where they are missing


def _accuracy(label: str, protocol: str, prefix: str = "", more: str = "") -> dict[str, Row]:
    """Returns the row of an accuracy with its 95 % interval, and that of the untrained encoder."""

    def trained(results: LevelResults) -> str:
        result = results[protocol]
        interval = result.get(f"{prefix}interval_95")  # not there in evaluations of earlier versions
        bounds = " ({:.1f} to {:.1f})".format(*interval) if interval else ""
        return f"{result[f'{prefix}accuracy']:.1f} %{bounds}" + more.format(**result)

    def untrained(results: LevelResults) -> str:
        return percent(results[protocol]["untrained"][f"{prefix}accuracy"])

    return {label: trained, f"{label}, untrained": untrained}


def _few_shot(shot: str) -> dict[str, Row]:
    """Returns the rows of the trained and of the untrained encoder with this many examples."""
    label = f"Few-shot, {shot} example{'' if shot == '1' else 's'}"
    return {
        label: lambda results: "{accuracy:.1f} ± {interval_95:.1f} %".format(**results["few_shot"]["shots"][shot]),
        f"{label}, untrained": lambda results: percent(results["few_shot"]["untrained"]["shots"][shot]["accuracy"]),
    }


def _chance(*protocols: str) -> Row:
    return lambda results: percent([results[name]["chance"] for name in protocols if name in results].pop())


def _quality(key: str) -> Row:
    return lambda results: short(results["feature_quality"][key], 3)


# Label of a row -> its text; a row that no level has results for is left out.
ROWS: dict[str, Row] = {
    **_accuracy("Linear probe, top-1", "linear_probe"),
    **_accuracy("Linear probe, last layers", "last_layers", more=", {features} numbers"),
    **_accuracy("Attentive probe", "attentive_probe", more=", rate {rate:g}, epoch {epoch} of {epochs}"),
    "Segmentation probe, mIoU": lambda results: percent(results["segmentation_probe"]["miou"]),
    "Segmentation probe, mIoU, untrained": lambda results: percent(results["segmentation_probe"]["untrained"]["miou"]),
    "Segmentation, commonest class": lambda results: percent(results["segmentation_probe"]["chance"]),
    "Linear probe, top-5": lambda results: percent(results["linear_probe"]["top5_accuracy"]),
    "Ridge probe, R²": lambda results: short(results["ridge_probe"]["r2"]),
    "Ridge probe, R², untrained": lambda results: short(results["ridge_probe"]["untrained"]["r2"]),
    "Ridge probe, mean error": lambda results: short(float(np.mean(results["ridge_probe"]["rmse"]))),
    "Error of the mean": lambda results: short(float(np.mean(results["ridge_probe"]["mean_rmse"]))),
    **_accuracy("k-NN, k 20, T 0.07", "knn", "fixed_"),
    **_accuracy("k-NN, k and T chosen", "knn", more=", k {k}, T {temperature:g}"),
    **_accuracy("Fine-tuned", "fine_tune", more=", epoch {epoch} of {epochs}"),
    "Chance": _chance("linear_probe", "knn", "fine_tune"),
    **_few_shot("1"),
    **_few_shot("5"),
    **_few_shot("10"),
    "Few-shot, chance": _chance("few_shot"),
    "Effective rank": lambda results: "{effective_rank:.1f} of {dimensions:.0f}".format(**results["feature_quality"]),
    "Rank ratio": _quality("rank_ratio"),
    "Components for 99 % of the variance": _quality("components_99"),
    "RankMe": _quality("rankme"),
    "LiDAR": _quality("lidar"),
    "alpha-ReQ": _quality("alpha_req"),
    "Variance per dimension, mean": _quality("variance_mean"),
    "Variance per dimension, smallest": _quality("variance_min"),
    "Mean absolute correlation": _quality("mean_abs_correlation"),
    "Relative spread, before normalisation": lambda results: short(
        results["feature_quality"]["raw"]["relative_spread"], 3
    ),
    "Collapse": lambda results: results["feature_quality"]["collapse"] or "none",
}
HEADLINE = ("Linear probe", "k-NN", "Fine-tuned", "Few-shot, 5")  # bars that are also key figures


def level_name(level: str | int) -> str:
    return f"level {level}"


def level_rows(results: LevelResults) -> dict[str, str]:
    """Returns label -> text of what was measured at a level."""
    rows = {}
    for label, show in ROWS.items():
        try:
            rows[label] = str(show(results))
        except (KeyError, TypeError, ValueError, IndexError, AttributeError):
            continue
    return rows


def evaluation_table(levels: Mapping[str, LevelResults]) -> list[list[str]]:
    """Returns rows of a label and a text for each level, or each run."""
    columns = [level_rows(results) for results in levels.values()]
    labels = [label for label in ROWS if any(label in column for column in columns)]
    return [[label, *(column.get(label, "–") for column in columns)] for label in labels]


def evaluation_markdown(record: Record) -> str:
    """Returns a heading, the table, and how the figures were measured."""
    levels = [level_name(level) for level in record["levels"]]
    lines = [
        f"# {record['method']}, {record['model']}, {record['data']}: step {record['step']:,}\n",
        markdown_table(["", *levels], evaluation_table(record["levels"]), right=levels),
        _conditions(record),
    ]
    for few_shot in [results["few_shot"] for results in record["levels"].values() if "few_shot" in results][:1]:
        how = f"{few_shot['ways']} classes, {few_shot['episodes']} episodes of test images"
        lines.append(f"Few-shot: {how}, nearest centroid, 95 % interval.")
    lines += [f"Note: {note}" for note in record["notes"]]
    return "\n".join(lines) + "\n"


def evaluation_text(record: Record) -> str:
    levels = [level_name(level) for level in record["levels"]] if len(record["levels"]) > 1 else []
    rows = [["", *levels]] if levels else []
    rows += evaluation_table(record["levels"])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    return "\n".join([*lines, "", _conditions(record), *(f"Note: {note}" for note in record["notes"])])


def _conditions(record: Record) -> str:
    names = {level_name(level): name for level, name in enumerate(record.get("level_names", []))}
    meanings = [f"{level.capitalize()}: {name}." for level, name in names.items() if name != level]
    elements = record.get("elements", "images")
    accuracies = (
        "Quote the linear probe of an encoder. Chance: guessing, or always the commonest class."
        if record["classes"]
        else ""
    )
    return " ".join(filter(None, [
        f"{record['train_images']:,} train and {record['test_images']:,} test {elements}, unaugmented. Choices were "
        f"made on {record['choices_made_on']}. In brackets: 95 % interval, from the number of test {elements}. "
        "Untrained: the same encoder before its first step.",
        accuracies,
        *meanings,
    ]))  # fmt: skip


def write_evaluation(evaluation: Evaluation) -> None:
    """Writes eval.md, eval.html and the figures of what was measured, beside eval.json."""
    folder, record = evaluation.folder, evaluation.record
    for level, results in record["levels"].items():
        for name, card in level_maps(results, record["classes"]).items():
            write_figure(folder / f"{name}_level{level}.svg", [card])
    for level, split in evaluation.points.items():
        labels, maps = split.labels if record["classes"] else None, maps_of(split)
        cards = [
            scatter_chart(title, places, labels, record["classes"], x_label=x_label, y_label=y_label)
            for title, (places, x_label, y_label) in maps.items()
        ]
        write_figure(folder / f"scatter_level{level}.svg", cards)
        if evaluation.mapped is not None:
            count = len(evaluation.mapped)
            stored = {"images": evaluation.mapped, "labels": split.labels[:count]}
            stored |= {title: places[:count] for title, (places, *_) in maps.items()}
            content = io.BytesIO()
            np.savez_compressed(content, allow_pickle=False, **stored)
            write_atomically(folder / f"map_level{level}.npz", content.getvalue())
    for level, rows in evaluation.neighbours.items():
        write_atomically(folder / f"neighbours_level{level}.png", png(grid([list(row) for row in rows])))
    if spectrum := spectrum_chart(record):
        write_figure(folder / "spectrum.svg", [spectrum])
    if evaluation.examples:
        write_atomically(folder / ATTENTION, png(attention_picture(evaluation.examples)))
    write_atomically(folder / "eval.md", evaluation_markdown(record))
    write_page(folder / "eval.html", evaluation_page(record, folder))


def attention_picture(examples: Examples) -> np.ndarray:
    """Returns one row per image as uint8 RGB: the image, PCA of its patches, and the attention of each head.

    The first three principal components of all patches are red, green and blue. A map is scaled to its largest weight.
    """
    patches = examples.patches
    components = pca(patches.reshape(-1, patches.shape[-1]), 3)[0]
    low, high = np.percentile(components, [1, 99], axis=0)
    colours = np.clip((components - low) / np.maximum(high - low, 1e-12), 0, 1).reshape(*patches.shape[:3], -1)
    maps = examples.attention / np.maximum(examples.attention.max(axis=(2, 3), keepdims=True), 1e-12)
    rows = [
        [image, *(np.round(255 * part).astype(np.uint8) for part in (colour, *heads[..., None]))]
        for image, colour, heads in zip(examples.images, colours, maps, strict=True)
    ]
    return grid(rows)


def level_maps(results: LevelResults, classes: Sequence[str]) -> dict[str, parts.Card]:
    """Returns the confusion matrix of the linear probe and the sweep of k-NN, where they were measured."""
    maps = {}
    if "confusion" in results.get("linear_probe", {}):  # rows are true classes
        counts = np.asarray(results["linear_probe"]["confusion"], float)
        maps["confusion"] = heat_map(
            "Confusion matrix of the linear probe",
            100 * counts / np.maximum(counts.sum(axis=1, keepdims=True), 1),
            classes,
            classes,
            x_label="predicted",
            y_label="true",
            limits=(0, 100),
            least=0.5,
            note="In percent of the images of a class.",
        )
    if "sweep" in (knn := results.get("knn", {})):
        ks, temperatures = list(knn["sweep"]["ks"]), list(knn["sweep"]["temperatures"])
        maps["knn"] = heat_map(
            "k-NN over k and temperature",
            knn["sweep"]["held_out_accuracy"],
            [f"{temperature:g}" for temperature in temperatures],
            [str(k) for k in ks],
            x_label="k",
            y_label="temperature",
            text="{:.1f}",
            marked=(temperatures.index(knn["temperature"]), ks.index(knn["k"])),
            note="In percent of held-out train images. Framed: the pair that was chosen.",
        )
    return maps


def maps_of(split: Split) -> dict[str, tuple[np.ndarray, str, str]]:
    """Returns PCA and, with scikit-learn, t-SNE of features: title -> (coordinates [N, 2], names of the axes)."""
    coordinates, shares = pca(split.features)
    x_label, y_label, *_ = [*(f"component {i + 1} ({100 * share:.0f} %)" for i, share in enumerate(shares)), ""]
    embedded = tsne(split.features)
    others = {} if embedded is None else {"t-SNE": (embedded, "", "")}
    return {"PCA": (coordinates, x_label, y_label)} | others


def tsne(features: np.ndarray) -> np.ndarray | None:
    """Returns the t-SNE [N, 2] of features (van der Maaten and Hinton 2008); None without scikit-learn."""
    try:
        from sklearn.manifold import TSNE
    except ImportError:
        return None
    x = pca(features, min(TSNE_COMPONENTS, features.shape[1]))[0].astype(np.float32)
    perplexity = min(PERPLEXITY, (len(x) - 1) / 3)
    init = "pca" if x.shape[1] > 1 else "random"
    return TSNE(perplexity=perplexity, init=init, random_state=0).fit_transform(x)


def evaluation_page(record: Record, folder: pathlib.Path) -> parts.Page:
    """Returns the page of an evaluation; figures are read from `folder` and embedded."""
    weights = "weights of the EMA target" if record["weights"] == "target" else "weights as trained"
    features = f"{weights}, pooled by {record['pool']}"
    levels, spectrum = record["levels"], spectrum_chart(record)
    table = parts.Table(evaluation_table(levels), ["", *map(level_name, levels)])
    notes = [parts.Text(note, "warn", "Note") for note in record["notes"]]
    names = map(str.capitalize, map(level_name, levels)) if len(levels) > 1 else ["Test accuracy"]
    bars = dict(zip(names, map(accuracy_bars, levels.values()), strict=True))
    accuracy: parts.Part = parts.Bars(bars) if any(bars.values()) else parts.absent("No accuracy was measured.")
    sections = [
        evaluation_headline(levels),
        parts.Section("", [parts.Card("", notes)] if notes else []),
        parts.Section("Accuracy", [parts.Card("", [accuracy])]),
        parts.Section("Figures", [parts.Card("", [table], _conditions(record))]),
        *(
            parts.Section("Targets", [targets_card(one["ridge_probe"])])
            for one in levels.values()
            if "ridge_probe" in one
        ),
        *(level_figures(record, folder, level) for level in levels),
        parts.Section("Spectrum", [spectrum] if spectrum else []),
        parts.Section("Attention", [_attention_card(folder)] if (folder / ATTENTION).exists() else []),
        glossary(label for results in levels.values() for label in level_rows(results)),
    ]
    return parts.Page(
        heading=folder.resolve().parent.name,
        badge="evaluation",
        subtitle=f"{record['method']} · {record['model']} · {record['data']} · step {record['step']:,} · {features}",
        sections=[section for section in sections if section.parts],
    )


MOST_COORDINATES = 40  # that a table shows


def targets_card(result: Mapping[str, Any]) -> parts.Card:
    """Returns the errors of a ridge probe for each coordinate, beside those of the mean."""
    columns = [result[name] for name in ("coordinates", "r2_by_coordinate", "rmse", "mean_rmse")]
    columns[2:2] = [result["untrained"]["r2_by_coordinate"]] if "untrained" in result else []
    headings = ["Target", "R²", *(["R², untrained"] if "untrained" in result else []), "Error", "Error of the mean"]
    rows = [[name, *map(short, numbers)] for name, *numbers in zip(*columns, strict=True)]
    more = f" The first {MOST_COORDINATES} of {len(rows)}." if len(rows) > MOST_COORDINATES else ""
    note = f"Ridge regression, root mean squared errors in the units of the data.{more}"
    return parts.Card("", [parts.Table(rows[:MOST_COORDINATES], headings)], note)


def _attention_card(folder: pathlib.Path) -> parts.Card:
    title = "Patches and attention of the last block"
    note = (
        "Each row: a test image, the first three principal components of its patches as red, green and blue, and what "
        "each head of the last block reads: weights of the CLS token where there is one, else the mean over patches."
    )
    return parts.Card(title, [embed_file(folder / ATTENTION, title, "picture")], note, wide=True)


def leading_level(levels: Mapping[str, LevelResults]) -> str:
    """Returns the level with the best linear probe, else k-NN, on held-out train images; else the first."""
    for protocol in ("linear_probe", "knn"):
        scores = {level: number(one.get(protocol, {}).get("held_out_accuracy")) for level, one in levels.items()}
        if known := {level: score for level, score in scores.items() if score is not None}:
            return max(known, key=lambda level: known[level])
    return next(iter(levels))


def evaluation_headline(levels: Mapping[str, LevelResults]) -> parts.Section:
    """Returns the figures of the leading level beside those of the untrained encoder, and any collapse in words."""
    figures_shown = []
    level = leading_level(levels)
    bars = {bar.label: bar for bar in accuracy_bars(levels[level])}
    for label in HEADLINE:
        if label in bars:
            value, reference = bars[label].value or 0.0, bars.get(f"{label}, untrained")
            note = bars[label].note
            if reference is not None:
                note = f"{value - (reference.value or 0.0):+.1f} points over untrained"
            note += f", {level_name(level)}" if len(levels) > 1 else ""
            figures_shown.append(parts.KeyFigure(label, percent(value), note, main=label == HEADLINE[0]))
    qualities = {level: results["feature_quality"] for level, results in levels.items() if "feature_quality" in results}
    if ranks := [(number(one["effective_rank"]) or 0.0, one["dimensions"]) for one in qualities.values()]:
        rank, dimensions = max(ranks)
        figures_shown.append(parts.KeyFigure("Effective rank", short(rank, 3), f"of {dimensions:.0f} dimensions"))
    collapsed = [f"{level_name(level)}: {one['collapse']}." for level, one in qualities.items() if one["collapse"]]
    return parts.Section(
        "", [parts.KeyFigures(figures_shown), *([parts.Card("Collapsed", collapsed)] if collapsed else [])]
    )


def accuracy_bars(results: LevelResults) -> list[parts.Bar]:
    """Returns the accuracies of one level that are known, each before that of the untrained encoder, and chance."""
    bars = []
    for label, name, prefix, style, note in (
        ("Linear probe", "linear_probe", "", "main", "frozen encoder"),
        ("Last layers", "last_layers", "", "run", "frozen encoder, {features} numbers"),
        ("Attentive probe", "attentive_probe", "", "run", "frozen patches"),
        ("k-NN", "knn", "fixed_", "run", "k 20, T 0.07"),
        ("k-NN, chosen", "knn", "", "run", "k {k}, T {temperature:g}"),
        ("Fine-tuned", "fine_tune", "", "main", "encoder and head"),
    ):
        if result := results.get(name):
            low, high = result.get(f"{prefix}interval_95") or (None, None)
            interval = "" if low is None else f", {low:.1f} to {high:.1f}"
            bars.append(parts.Bar(label, result[f"{prefix}accuracy"], style, note.format(**result) + interval))
            bars.append(_untrained_bar(label, result.get("untrained", {}).get(f"{prefix}accuracy")))
    if known := [one["chance"] for name, one in results.items() if "chance" in one and "accuracy" in one]:
        bars.append(parts.Bar("Chance", known[0], "baseline"))
    few_shot = results.get("few_shot", {})
    for shot, one in few_shot.get("shots", {}).items():
        label, untrained = f"Few-shot, {shot}", few_shot.get("untrained", {}).get("shots", {}).get(shot, {})
        bars.append(parts.Bar(label, one["accuracy"], "run", f"{few_shot['ways']}-way, ± {one['interval_95']:.1f}"))
        bars.append(_untrained_bar(label, untrained.get("accuracy")))
    if few_shot.get("shots"):
        bars.append(parts.Bar("Few-shot, chance", few_shot.get("chance"), "baseline", f"{few_shot['ways']}-way"))
    return [bar for bar in bars if bar.value is not None]


def _untrained_bar(label: str, accuracy: float | None) -> parts.Bar:
    return parts.Bar(f"{label}, untrained", accuracy, "baseline", "before the first step")


def level_figures(record: Record, folder: pathlib.Path, level: str) -> parts.Section:
    results = record["levels"][level]
    cards = list(level_maps(results, record["classes"]).values())
    if (scatter := folder / f"scatter_level{level}.svg").exists():
        title = "Features of test images"
        cards.append(parts.Card(title, [embed_file(scatter, title, "picture")], wide=True))
    if (stored := folder / f"map_level{level}.npz").exists():
        cards.append(parts.Card("The same, by their pictures", [stored_maps(stored, record["classes"])], wide=True))
    if (rows := folder / f"neighbours_level{level}.png").exists():
        title = "Nearest neighbours"
        note = "Each row: a test image, then the five of the pictured ones whose features are nearest to its own."
        cards.append(parts.Card(title, [embed_file(rows, title, "picture")], note, wide=True))
    if tuned := results.get("fine_tune"):
        scores = [tuned["start_accuracy"], *tuned["held_out_accuracies"]]
        series = [Series("held-out accuracy", range(len(scores)), scores)]
        cards.append(line_chart("Fine-tuning", series, x_label="epoch", y_label="% of held-out images", wide=True))
    title = "Pictures" if len(record["levels"]) == 1 else level_name(level).capitalize()
    return parts.Section(title, [parts.card_grid(cards)] if any(cards) else [])


def stored_maps(path: pathlib.Path, classes: Sequence[str]) -> parts.PictureMaps:
    """Returns the maps of a file that `write_evaluation` wrote."""
    with np.load(path) as stored:
        maps = {title: stored[title] for title in ("PCA", "t-SNE") if title in stored}
        return feature_maps(stored["images"], maps, stored["labels"] if classes else None, classes)


def spectrum_chart(record: Record) -> parts.Card | None:
    """Returns a chart of the singular values over their rank, one line per level; None if none were measured."""
    found = {level: results.get("feature_quality", {}).get("spectrum") for level, results in record["levels"].items()}
    series = [Series(level_name(level), range(1, len(y) + 1), y) for level, y in found.items() if y]
    title = "Singular values of centred features"
    return line_chart(title, series, x_label="component", x_log=True, log="first") if series else None
