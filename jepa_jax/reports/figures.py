"""Figures as PNG files; matplotlib is imported when the first one is drawn."""

import io
import pathlib
from typing import Any

from jepa_jax.base.files import write_atomically

DPI = 150
PALETTE = "#2456c8 #d9622b #128a6b #9b3fb0 #b48a00 #0e8fb5 #c2325f #6b7280 #7aa53a #8b5a2b".split()


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
