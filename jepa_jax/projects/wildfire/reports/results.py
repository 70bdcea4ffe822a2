"""Figures of predicted masks beside those of baselines, for pages and terminals."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jepa_jax.base.text import number
from jepa_jax.reports.parts import KeyFigure, Section
from jepa_jax.reports.tables import text_table

if TYPE_CHECKING:
    from jepa_jax.reports.run_files import RunFiles

ROWS = {  # of whom, and how the keys of the summary begin
    "persistence": "persistence_",
    "dilation": "dilation_",
    "logistic": "logistic_",
    "boosting": "boosting_",
    "untrained model": "untrained_",
    "model, other wind": "shuffled_wind_",
    "model": "",
}
COLUMNS = {  # key of the summary, and its heading
    "average_precision": "AP",
    "new_average_precision": "AP of newly burning",
    "precision": "precision",
    "recall": "recall",
    "f1": "F1",
    "iou": "IoU",
}
KEY_FIGURES = {
    "new_average_precision": "Average precision, newly burning",
    "average_precision": "Average precision",
    "f1": "F1",
}
SPREADS = {"average_precision": "AP", "new_average_precision": "AP of newly burning", "f1": "F1"}


class NextMaskResults:
    """See `jepa_jax.reports.run_files.Results`."""

    charts = {
        f"{KEY_FIGURES[key]}, validation fires": {
            f"eval/validation_{key}": "model",
            f"eval/validation_baseline_{key}": "best baseline",
        }
        for key in ("new_average_precision", "average_precision")
    }

    def key_figures(self, run: "RunFiles") -> list[KeyFigure]:
        """Returns average precisions and F1 of the test fires; of validation fires while the run trains."""
        final = run.result("average_precision") is not None
        measured = []
        for key, title in KEY_FIGURES.items():
            value = run.result(key) if final else run.latest(f"eval/validation_{key}")
            best = run.result(f"baseline_{key}") if final else run.latest(f"eval/validation_baseline_{key}")
            note = "test fires" if final else "validation fires"
            note = note if best is None else f"best baseline {best:.3f}"
            if value is not None:
                measured.append(KeyFigure(title, f"{value:.3f}", note, main=key == "new_average_precision"))
        return measured

    def section(self, run: "RunFiles") -> "Section | None":
        from jepa_jax.projects.wildfire.reports.fires_page import fires_section

        return fires_section(run)

    def summary_lines(self, summary: Mapping[str, Any]) -> list[str]:
        rows = result_rows(summary)
        return [text_table([["", *COLUMNS.values()], *rows]), *result_sentences(summary)] if rows else []


def result_rows(summary: Mapping[str, Any]) -> list[list[str]]:
    """Returns names and figures of model and baselines, the model last; [] if a run predicted no masks."""
    rows = []
    for name, prefix in ROWS.items():
        values = [number(summary.get(f"{prefix}{key}")) for key in COLUMNS]
        if "average_precision" in summary and any(value is not None for value in values):
            rows.append([name, *("–" if value is None else f"{value:.3f}" for value in values)])
    return rows


def result_sentences(summary: Mapping[str, Any]) -> list[str]:
    """Returns the lead over the best baseline with its interval, the spread over fires, and where masks are cut."""
    sentences = []
    for key, title in list(COLUMNS.items())[:2]:
        gain, interval = number(summary.get(f"{key}_gain")), _interval(summary.get(f"{key}_gain_interval_95"))
        if gain is not None:
            sentences.append(f"{title}: {gain:+.3f} over the best baseline{interval}.")
    spreads = []
    for key, title in SPREADS.items():
        mean, std = (number(summary.get(f"fire_{key}_{what}")) for what in ("mean", "std"))
        if mean is not None and std is not None:
            spreads.append(f"{title} {mean:.3f} ± {std:.3f}")
    fires, threshold = number(summary.get("test_fires")), number(summary.get("threshold"))
    if spreads and fires:
        sentences.append(f"Mean and standard deviation over {fires:,.0f} test fires: {', '.join(spreads)}.")
    if threshold is not None:
        how = "the highest F1 on validation data" if summary.get("threshold_is_chosen") else "not chosen"
        sentences.append(f"Masks are cut at probability {threshold:.3f} ({how}).")
    return sentences


def _interval(values: Any) -> str:
    ends = [number(value) for value in values] if isinstance(values, list) else []
    low, high = ends if len(ends) == 2 else (None, None)
    return "" if low is None or high is None else f" (95 %, fires drawn anew: {low:+.3f} to {high:+.3f})"
