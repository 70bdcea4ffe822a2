"""Figures of planning and of prediction beside those of baselines, for pages and terminals."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jepa_jax.base.text import number
from jepa_jax.reports.parts import KeyFigure, Section
from jepa_jax.reports.tables import text_table

if TYPE_CHECKING:
    from jepa_jax.reports.run_files import RunFiles

CONTROLLERS = {  # of whom, and how the keys of the summary begin
    "random actions": "random_",
    "straight line": "straight_",
    "untrained model": "untrained_",
    "model, plans of other episodes": "shuffled_",
    "true dynamics, same search": "true_dynamics_",
    "model": "",
}
PREDICTORS = {
    "copy of the last frame": "copy_last_",
    "untrained model": "untrained_",
    "model, other actions": "other_actions_",
    "frame itself (encoded)": "encoded_",
    "model": "model_",
}
SUCCESS, ERRORS = "success_rate", "position_errors"


class WorldModelResults:
    """See `jepa_jax.reports.run_files.Results`."""

    charts = {"Success, validation tasks": {"eval/validation_success_rate": "percent"}}

    def key_figures(self, run: "RunFiles") -> list[KeyFigure]:
        measured = []
        if (rate := run.result(SUCCESS)) is not None:
            untrained = run.result(f"untrained_{SUCCESS}")
            note = f"{run.result('episodes'):,.0f} episodes"
            note += "" if untrained is None else f"; untrained {untrained:.1f} %"
            measured.append(KeyFigure("Success", f"{rate:.1f} %", note, main=True))
        if (error := run.result("position_error")) is not None:
            note = f"{run.result('horizon'):.0f} steps ahead"
            measured.append(KeyFigure("Position error", f"{error:.2f}", note, main=not measured))
        return measured

    def section(self, run: "RunFiles") -> "Section | None":
        from jepa_jax.projects.world_models.reports.section import world_model_section

        return world_model_section(run)

    def summary_lines(self, summary: Mapping[str, Any]) -> list[str]:
        lines = []
        if rows := success_rows(summary):
            lines += [text_table([["", "success, %"], *rows]), *sentences(summary)]
        if errors := errors_by_horizon(summary):
            horizon = max(map(len, errors.values()))
            header = ["position error after steps", *map(str, range(1, horizon + 1))]
            lines.append(text_table([header, *([name, *(f"{e:.2f}" for e in own)] for name, own in errors.items())]))
        return lines


def success_rows(summary: Mapping[str, Any]) -> list[list[str]]:
    """Returns names and success rates, the model last; [] for a run without episodes."""
    if number(summary.get(SUCCESS)) is None:
        return []
    rates = {name: number(summary.get(f"{prefix}{SUCCESS}")) for name, prefix in CONTROLLERS.items()}
    return [[name, f"{rate:.1f}"] for name, rate in rates.items() if rate is not None]


def errors_by_horizon(summary: Mapping[str, Any]) -> dict[str, list[float]]:
    """Returns the errors of positions after 1, 2, ... steps by name of the predictor; {} for a run without them."""
    found = {name: summary.get(f"{prefix}{ERRORS}") for name, prefix in PREDICTORS.items()}
    return {name: errors for name, errors in found.items() if errors} if "model_position_errors" in summary else {}


def sentences(summary: Mapping[str, Any]) -> list[str]:
    """Returns the interval of the success rate, how long the ways are, and what a plan costs."""
    said = []
    if interval := summary.get("success_interval"):
        said.append(f"95 % interval of {summary['episodes']:,} episodes: {interval[0]:.1f} to {interval[1]:.1f} %.")
    detour, best = (number(summary.get(f"{prefix}detour")) for prefix in ("", "true_dynamics_"))
    if detour is not None:
        beside = "" if best is None else f" (true dynamics: {best:.2f})"
        said.append(f"Ways of successes are {detour:.2f} times as long as the shortest, in the median{beside}.")
    if (seconds := number(summary.get("seconds_per_plan"))) is not None:
        said.append(f"A plan took {1000 * seconds:.2f} ms, all episodes at once.")
    return said
