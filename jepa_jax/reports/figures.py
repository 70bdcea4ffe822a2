"""Figures of an evaluation as PNG files; matplotlib is imported when the first one is drawn."""

import io
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jepa_jax.base.files import write_atomically
from jepa_jax.data.pictures import grid, png
from jepa_jax.evals.features import Split
from jepa_jax.reports.projection import patch_colours, pca, tsne

DPI = 150
PICTURED_IMAGES = 10  # in the picture of patch features
PALETTE = (
    "#2456c8", "#d9622b", "#128a6b", "#9b3fb0", "#b48a00", "#0e8fb5", "#c2325f", "#6b7280", "#7aa53a", "#8b5a2b",
)  # fmt: skip


def confusion_figure(path: pathlib.Path, confusion: Sequence[Sequence[int]], classes: Sequence[str]) -> None:
    """Rows are true classes, in percent of their images."""
    counts = np.asarray(confusion, float)
    share = 100 * counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    few = len(classes) <= 20
    side = 1.8 + 0.42 * len(classes) if few else 7.5
    figure, axes = _axes((side + 0.9, side))
    image = axes.imshow(share, cmap="Blues", vmin=0, vmax=100)
    if few:
        for (row, column), value in np.ndenumerate(share):
            if value >= 0.5:
                colour = "white" if value > 55 else "#16191f"
                axes.text(column, row, f"{value:.0f}", ha="center", va="center", fontsize=8, color=colour)
        axes.set_xticks(range(len(classes)), classes, rotation=45, ha="right")
        axes.set_yticks(range(len(classes)), classes)
    axes.set(xlabel="predicted", ylabel="true")
    axes.spines[:].set_visible(False)
    figure.colorbar(image, ax=axes, fraction=0.046, pad=0.03, label="% of the class")
    _save(figure, path)


def sweep_figure(path: pathlib.Path, knn: Mapping[str, Any]) -> None:
    """Held-out accuracy over k and T, with the chosen pair framed."""
    sweep = knn["sweep"]
    values, ks, temperatures = np.asarray(sweep["held_out_accuracy"]), sweep["ks"], sweep["temperatures"]
    figure, axes = _axes((6.4, 4.2))
    image = axes.imshow(values, cmap="viridis", aspect="auto")
    middle = (values.min() + values.max()) / 2
    for (row, column), value in np.ndenumerate(values):
        colour = "white" if value < middle else "#16191f"
        axes.text(column, row, f"{value:.1f}", ha="center", va="center", fontsize=8, color=colour)
    chosen = list(ks).index(knn["k"]), list(temperatures).index(knn["temperature"])
    from matplotlib.patches import Rectangle

    axes.add_patch(Rectangle((chosen[0] - 0.5, chosen[1] - 0.5), 1, 1, fill=False, edgecolor="#c22f2f", linewidth=2))
    axes.set_xticks(range(len(ks)), ks)
    axes.set_yticks(range(len(temperatures)), [f"{t:g}" for t in temperatures])
    axes.set(xlabel="k", ylabel="temperature")
    axes.spines[:].set_visible(False)
    figure.colorbar(image, ax=axes, fraction=0.046, pad=0.03, label="% of held-out train images")
    _save(figure, path)


def spectrum_figure(path: pathlib.Path, spectra: Mapping[str, Sequence[float]]) -> None:
    """Singular values over their rank, a line for each level."""
    figure, axes = _axes((6.4, 4.2))
    for index, (name, spectrum) in enumerate(spectra.items()):
        axes.plot(np.arange(1, len(spectrum) + 1), spectrum, color=PALETTE[index % len(PALETTE)], label=name)
    axes.set(xscale="log", yscale="log", xlabel="component", ylabel="singular value")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if len(spectra) > 1:
        axes.legend(frameon=False)
    _save(figure, path)


def scatter_figure(path: pathlib.Path, split: Split, classes: Sequence[str]) -> None:
    """PCA and t-SNE of features, a colour a class."""
    coordinates, shares = pca(split.features)
    panels = [
        ("PCA", coordinates, [f"component {i + 1} ({100 * share:.0f} %)" for i, share in enumerate(shares)]),
        ("t-SNE", tsne(split.features), ["", ""]),
    ]
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5.2), layout="constrained")
    many = len(classes) > len(PALETTE)
    colours = [colormaps["turbo"](i / max(1, len(classes) - 1)) if many else PALETTE[i] for i in range(len(classes))]
    for axes, (title, points, labels) in zip(figure.subplots(1, 2), panels, strict=True):
        for label, name in enumerate(classes):
            own = points[split.labels == label]
            axes.scatter(own[:, 0], own[:, 1], s=9, color=colours[label], label=name, linewidths=0, alpha=0.8)
        axes.set(title=title, xlabel=labels[0], ylabel=labels[1] if len(labels) > 1 else "", xticks=[], yticks=[])
        axes.spines[:].set_color("#d5d9e0")
    if len(classes) <= 20:
        figure.legend(
            *axes.get_legend_handles_labels(), loc="outside lower center", ncols=10, frameon=False, markerscale=2
        )
    _save(figure, path)


def patch_figure(path: pathlib.Path, images: np.ndarray, maps: np.ndarray) -> None:
    """Images above the three principal components of their patch features as colours."""
    write_atomically(path, png(grid([list(images), list(patch_colours(maps))])))


def _axes(size: tuple[float, float]):
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.subplots()


def _save(figure: Any, path: pathlib.Path) -> None:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI, bbox_inches="tight")  # or a label may be cut off
    write_atomically(path, buffer.getvalue())
