"""Prints what a finished run reached: accuracies beside those of its baselines, feature quality, speed.

jepa-jax show-summary --workdir=runs/quickstart
"""

import argparse
import pathlib
from collections.abc import Mapping
from typing import Any

from jepa_jax.base.console import Console
from jepa_jax.base.errors import UserError
from jepa_jax.cli.command import Command, Result
from jepa_jax.cli.flags import Parser
from jepa_jax.reports.masks.results import results_text


def add_flags(parser: Parser) -> None:
    parser.add_flag("workdir", "DIR", "folder of a run", required=True)


def show_summary(arguments: argparse.Namespace, console: Console) -> Result:
    from jepa_jax.program.workdir import Workdir

    folder = Workdir(arguments.workdir)
    summary = folder.read_summary()
    if summary is None or summary["status"] != "finished":
        raise UserError(f"{folder.path}: no finished run; train first, or check --workdir")
    return Result([summary], summary_text(summary, folder.path))


def summary_text(summary: Mapping[str, Any], workdir: str | pathlib.Path) -> str:
    """Returns a table of a run's results, chance and baselines first; what was not measured is left out."""
    accuracies = {
        "chance": summary.get("chance_accuracy"),
        **summary.get("baselines", {}),
        "untrained encoder, linear probe": summary.get("untrained_probe_accuracy"),
        "untrained encoder, k-NN": summary.get("untrained_knn_accuracy"),
        "trained encoder, linear probe": summary.get("probe_accuracy"),
        "trained encoder, k-NN": summary.get("knn_accuracy"),
    }
    figures = {
        "effective rank of the features": summary.get("effective_rank"),
        "LiDAR": summary.get("lidar"),
        "images per second": summary.get("images_per_sec"),
    }
    lines = [f"{name:<52} {value:8.1f} %" for name, value in accuracies.items() if value is not None]
    lines += [f"{name:<52} {value:8,.1f}" for name, value in figures.items() if value is not None]
    if summary.get("num_classes") == 1:
        lines.insert(0, "All images are of one class: no accuracy is measured.")
    masks = results_text(summary)
    return "\n".join([*masks, *([""] if masks else []), *lines, "", f"report: {pathlib.Path(workdir) / 'report.html'}"])


SHOW_SUMMARY = Command("show-summary", __doc__, add_flags, show_summary, uses_jax=False)
main = SHOW_SUMMARY.main
