"""Figures of predicted masks, beside those of baselines, as rows of a table; for terminals and pages."""

from collections.abc import Mapping
from typing import Any

from jepa_jax.base.text import number

ROWS = {  # of whom, and how the keys of the summary begin
    "persistence": "persistence_",
    "dilation": "dilation_",
    "logistic": "logistic_",
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
SPREADS = {"average_precision": "AP", "new_average_precision": "AP of newly burning", "f1": "F1"}


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


def results_text(summary: Mapping[str, Any]) -> list[str]:
    """Returns the table and the sentences as lines for a terminal."""
    rows = result_rows(summary)
    if not rows:
        return []
    header = ["", *COLUMNS.values()]
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    lines = [
        "  ".join(
            text.rjust(width) if i else text.ljust(width)
            for i, (text, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in (header, *rows)
    ]
    return [*lines, *result_sentences(summary)]
