"""The contract by which a project shows the results of its runs in report.html and `show-summary`."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from jepa_jax.base.classes import ClassTable, load_object

if TYPE_CHECKING:  # `show-summary` imports no page
    from jepa_jax.reports.parts import KeyFigure, Section
    from jepa_jax.reports.run_files import RunFiles

RESULTS = ClassTable("RESULTS", {})  # the core shows accuracies of encoders; everything else belongs to projects


class Results(Protocol):
    """Shows figures of one kind of task, and nothing for runs that do not have them.

    Attributes:
      charts: titles of charts, and for each the names of its curves by metric.
    """

    charts: Mapping[str, Mapping[str, str]]

    def key_figures(self, run: "RunFiles") -> "list[KeyFigure]":
        """Returns the figures that replace the accuracies of an encoder at the top of the page."""
        ...

    def section(self, run: "RunFiles") -> "Section | None":
        """Returns the project's section of the page; may write further files into the folder of the run."""
        ...

    def summary_lines(self, summary: Mapping[str, Any]) -> list[str]:
        """Returns the figures of summary.json as lines for a terminal."""
        ...


def project_results() -> list[Results]:
    """Returns the `Results` of all projects."""
    return [load_object(reference)() for reference in RESULTS.values()]
