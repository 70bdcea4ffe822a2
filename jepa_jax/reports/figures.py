"""Figures as PNG files; matplotlib is imported when the first one is drawn."""

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
MANY_CLASSES = 20  # above this number, classes are neither named nor numbered
PALETTE = "#2456c8 #d9622b #128a6b #9b3fb0 #b48a00 #0e8fb5 #c2325f #6b7280 #7aa53a #8b5a2b".split()


def confusion_figure(path: pathlib.Path, confusion: Sequence[Sequence[int]], classes: Sequence[str]) -> None:
    """Draws a confusion matrix; rows are true classes, in percent of their images."""
    counts = np.asarray(confusion, float)
    share = 100 * counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    few = len(classes) <= MANY_CLASSES
    side = 1.8 + 0.42 * len(classes) if few else 7.5
    figure, axes = new_figure((side + 0.9, side))
    image = axes.imshow(share, cmap="Blues", vmin=0, vmax=100)
    if few:
        _write_values(axes, np.where(share >= 0.5, share, np.nan), "{:.0f}", white=share > 55)
        axes.set_xticks(range(len(classes)), classes, rotation=45, ha="right")
        axes.set_yticks(range(len(classes)), classes)
    axes.set(xlabel="predicted", ylabel="true")
    figure.colorbar(image, ax=axes, fraction=0.046, pad=0.03, label="% of the class")
    save_figure(figure, path)


def knn_figure(path: pathlib.Path, knn: Mapping[str, Any]) -> None:
    """Draws the held-out accuracy of k-NN over k and T, with the chosen pair framed."""
    from matplotlib.patches import Rectangle

    ks, temperatures = list(knn["sweep"]["ks"]), list(knn["sweep"]["temperatures"])
    values = np.asarray(knn["sweep"]["held_out_accuracy"])
    figure, axes = new_figure((6.4, 4.2))
    image = axes.imshow(values, cmap="viridis", aspect="auto")
    _write_values(axes, values, "{:.1f}", white=values < (values.min() + values.max()) / 2)
    corner = ks.index(knn["k"]) - 0.5, temperatures.index(knn["temperature"]) - 0.5
    axes.add_patch(Rectangle(corner, 1, 1, fill=False, edgecolor="#c22f2f", linewidth=2))
    axes.set_xticks(range(len(ks)), ks)
    axes.set_yticks(range(len(temperatures)), [f"{t:g}" for t in temperatures])
    axes.set(xlabel="k", ylabel="temperature")
    figure.colorbar(image, ax=axes, fraction=0.046, pad=0.03, label="% of held-out train images")
    save_figure(figure, path)


def _write_values(axes: Any, values: np.ndarray, text: str, white: np.ndarray) -> None:
    """Writes each finite value into its cell of a heat map."""
    axes.spines[:].set_visible(False)
    for (row, column), value in np.ndenumerate(values):
        if np.isfinite(value):
            colour = "white" if white[row, column] else "#16191f"
            axes.text(column, row, text.format(value), ha="center", va="center", fontsize=8, color=colour)


def spectrum_figure(path: pathlib.Path, spectra: Mapping[str, Sequence[float]]) -> None:
    """Draws singular values over their rank, one line per level."""
    figure, axes = new_figure((6.4, 4.2))
    for index, (name, spectrum) in enumerate(spectra.items()):
        axes.plot(np.arange(1, len(spectrum) + 1), spectrum, color=PALETTE[index % len(PALETTE)], label=name)
    axes.set(xscale="log", yscale="log", xlabel="component", ylabel="singular value")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if len(spectra) > 1:
        axes.legend(frameon=False)
    save_figure(figure, path)


def scatter_figure(path: pathlib.Path, split: Split, classes: Sequence[str]) -> None:
    """Draws PCA and t-SNE of features, one colour per class."""
    from matplotlib import colormaps

    coordinates, shares = pca(split.features)
    panels = [
        ("PCA", coordinates, [f"component {i + 1} ({100 * share:.0f} %)" for i, share in enumerate(shares)]),
        ("t-SNE", tsne(split.features), ["", ""]),
    ]
    colours: Sequence[Any] = PALETTE
    if len(classes) > len(PALETTE):
        colours = [colormaps["turbo"](i / (len(classes) - 1)) for i in range(len(classes))]
    figure, both = new_figure((11, 5.2), columns=2)
    for axes, (title, points, labels) in zip(both, panels, strict=True):
        for label, name in enumerate(classes or ["test images"]):
            own = points[split.labels == label] if classes else points
            axes.scatter(own[:, 0], own[:, 1], s=9, color=colours[label], label=name, linewidths=0, alpha=0.8)
        axes.set(title=title, xlabel=labels[0], ylabel=labels[1] if len(labels) > 1 else "", xticks=[], yticks=[])
        axes.spines[:].set_color("#d5d9e0")
    if len(classes) <= MANY_CLASSES:
        handles = both[0].get_legend_handles_labels()
        figure.legend(*handles, loc="outside lower center", ncols=10, frameon=False, markerscale=2)
    save_figure(figure, path)


def patch_figure(path: pathlib.Path, images: np.ndarray, maps: np.ndarray) -> None:
    """Draws images above the first three principal components of their patch features as colours."""
    write_atomically(path, png(grid([list(images), list(patch_colours(maps))])))


def new_figure(size: tuple[float, float], columns: int = 1) -> tuple[Any, Any]:
    """Returns a figure and its axes: one, or an array of several side by side."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.subplots(1, columns)


def save_figure(figure: Any, path: pathlib.Path) -> None:
    """Writes a figure as PNG."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI, bbox_inches="tight")  # keeps long labels inside
    write_atomically(path, buffer.getvalue())
