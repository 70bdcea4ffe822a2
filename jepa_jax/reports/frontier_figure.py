"""Memory against predicted time of the combinations of remat and accumulation, as a figure."""

import pathlib

from jepa_jax.base.text import GIB
from jepa_jax.planning.estimate import Estimate
from jepa_jax.planning.frontier import Frontier
from jepa_jax.planning.planner import REMATS
from jepa_jax.reports.figures import PALETTE, new_figure, save_figure


def frontier_figure(path: pathlib.Path, frontier: Frontier, title: str) -> None:
    """Draws each combination as a point, those that none beats joined by a line, and the budget."""
    figure, axes = new_figure((7.5, 4.6))
    best = frontier.best
    axes.plot(*zip(*map(_place, best), strict=True), color="#9aa7bd", linewidth=1.2, zorder=1)
    for policy, colour in zip(REMATS, PALETTE, strict=False):
        own = [point for point in frontier.points if point.changes["train.remat"] == policy]
        if own:
            axes.scatter(*zip(*map(_place, own), strict=True), color=colour, label=f"remat {policy}", zorder=2)
        for point in own:
            parts = point.changes["train.accum_steps"]
            axes.annotate(f"{parts} parts" if parts > 1 else "whole", _place(point), fontsize=7,
                          textcoords="offset points", xytext=(5, 4))  # fmt: skip
    axes.axvline(frontier.budget_bytes / GIB, color="#c22f2f", linestyle="--", linewidth=1.1, label="budget")
    axes.set(title=title, xlabel="memory needed, GiB", ylabel="predicted ms per step", xlim=(0, None))
    axes.legend(frameon=False, fontsize=8)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    save_figure(figure, path)


def _place(point: Estimate) -> tuple[float, float]:
    return point.need.total / GIB, 1e3 * point.speed.seconds
