"""How figures differ from fire to fire, and how far chance in the choice of fires can move them."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jepa_jax.projects.wildfire.evals.truth import Truth, mask_figures

LISTED_FIRES = 5  # worst and best
RESAMPLES = 1000
LEVELS = 2048  # of scores that resampling tells apart

FireFigures = Mapping[int, Mapping[str, float | None]]  # by the number of the fire, the lowest AP first


def fire_spread(figures: FireFigures) -> dict[str, Any]:
    """Returns mean and standard deviation over fires of AP, AP of new pixels and F1, and the worst and best ones by AP.

    A fire without a positive pixel has no AP and is left out, for new pixels also one without a new positive pixel.

    Args:
      figures: those of `fire_figures`.
    """
    spread: dict[str, Any] = {}
    for name in ("average_precision", "new_average_precision", "f1"):
        values = [value for own in figures.values() if (value := own[name]) is not None]
        spread[f"fire_{name}_mean"] = float(np.mean(values)) if values else None
        spread[f"fire_{name}_std"] = float(np.std(values)) if values else None
    order = list(figures)
    return spread | {"worst_fires": order[:LISTED_FIRES], "best_fires": order[::-1][:LISTED_FIRES]}


def fire_figures(scores: np.ndarray, truth: Truth, threshold: float) -> dict[int, dict[str, float | None]]:
    """Returns the figures of each fire that has an average precision, the fire with the lowest one first."""
    figures = {}
    for fire in truth.fires.tolist():
        own = np.flatnonzero(truth.fire == fire)
        figures[fire] = mask_figures(scores[own], Truth(*(values[own] for values in truth)), threshold)
    measured = [fire for fire in figures if figures[fire]["average_precision"] is not None]
    return {fire: figures[fire] for fire in sorted(measured, key=lambda fire: figures[fire]["average_precision"] or 0)}


def resampled_average_precisions(scores: np.ndarray, truth: Truth, *, new: bool = False) -> np.ndarray:
    """Returns the pooled AP of sets made of as many fires, drawn with replacement: [RESAMPLES].

    Draws depend on the fires alone, so that two kinds of scores can be compared draw by draw. Scores are rounded down
    to LEVELS quantiles of those of positive pixels: resampling then costs one product of matrices, and the AP deviates
    by less than 1 / LEVELS where the curve is smooth. NaN where a draw has no positive pixel.
    """
    counted = truth.new if new else truth.known
    fires, each = np.unique(truth.fire, return_inverse=True)
    positive = scores[counted & truth.target]
    if not len(positive):
        return np.full(RESAMPLES, np.nan)
    levels = np.unique(np.quantile(positive, np.linspace(0, 1, LEVELS), method="lower"))
    hits, false_alarms = (np.zeros((len(fires), len(levels) + 1)) for _ in range(2))
    for image, fire in enumerate(each):
        own, is_target = scores[image][counted[image]], truth.target[image][counted[image]]
        level = np.searchsorted(levels, own, "right")  # 0: below every positive pixel
        hits[fire] += np.bincount(level[is_target], minlength=len(levels) + 1)
        false_alarms[fire] += np.bincount(level[~is_target], minlength=len(levels) + 1)
    draws = np.random.default_rng(0).multinomial(len(fires), np.full(len(fires), 1 / len(fires)), RESAMPLES)
    return _average_precisions(draws @ hits[:, 1:], draws @ false_alarms[:, 1:])


def _average_precisions(hits: np.ndarray, false_alarms: np.ndarray) -> np.ndarray:
    """Returns the AP of each row of counts by ascending score."""
    above, wrong = (np.cumsum(counts[:, ::-1], axis=1)[:, ::-1] for counts in (hits, false_alarms))
    precision = above / np.maximum(above + wrong, 1)
    with np.errstate(invalid="ignore"):
        return np.sum(hits * precision, axis=1) / above[:, 0]


def interval_95(values: np.ndarray) -> list[float] | None:
    """Returns the percentiles 2.5 and 97.5 of what was drawn; None if nothing was measured."""
    values = values[~np.isnan(values)]
    return np.percentile(values, (2.5, 97.5)).tolist() if len(values) else None
