"""How well scores rank pixels: average precision, the best threshold, and what a threshold gives.

A pixel is predicted where its score is at least the threshold. Everything is exact, with ties, and counts pixels of a
whole set: the mean over batches of a precision is another number.
"""

from typing import NamedTuple, Self

import numpy as np


class Ranking(NamedTuple):
    """Hits and false alarms at each distinct score of a positive pixel, from the lowest score to the highest.

    Other thresholds need not be looked at: between two scores of positives, a lower one only adds false alarms.
    """

    thresholds: np.ndarray  # [K], ascending
    hits: np.ndarray  # [K], positives with at least this score
    false_alarms: np.ndarray  # [K], negatives with at least this score

    @classmethod
    def of(cls, scores: np.ndarray, target: np.ndarray) -> Self:
        """Counts; scores [N], target bool [N]."""
        thresholds, counts = np.unique(scores[target], return_counts=True)
        negatives = np.sort(scores[~target])
        hits = np.cumsum(counts[::-1])[::-1]
        return cls(thresholds, hits, len(negatives) - np.searchsorted(negatives, thresholds, "left"))


def average_precision(ranking: Ranking) -> float | None:
    """Returns the sum over thresholds of precision times the gain of recall; None without positives.

    This is the step-wise area under the curve of precision over recall, without interpolation: what
    `sklearn.metrics.average_precision_score` computes.
    """
    if not len(ranking.hits):
        return None
    gained = -np.diff(ranking.hits, append=0)  # positives of exactly this score
    precision = ranking.hits / (ranking.hits + ranking.false_alarms)
    return float(np.sum(gained * precision) / ranking.hits[0])


def best_threshold(ranking: Ranking) -> float | None:
    """Returns the threshold with the highest F1, the highest one of equals; None without positives."""
    if not len(ranking.hits):
        return None
    f1 = 2 * ranking.hits / (ranking.hits + ranking.false_alarms + ranking.hits[0])
    return float(ranking.thresholds[len(f1) - 1 - np.argmax(f1[::-1])])


def threshold_figures(predicted: np.ndarray, target: np.ndarray) -> dict[str, float]:
    """Returns precision, recall, F1 and IoU of predicted pixels bool [N]; a ratio of no pixels is 0."""
    hits, positives, true = (int(np.sum(chosen)) for chosen in (predicted & target, predicted, target))
    return {
        "precision": hits / max(positives, 1),
        "recall": hits / max(true, 1),
        "f1": 2 * hits / max(positives + true, 1),
        "iou": hits / max(positives + true - hits, 1),
    }
