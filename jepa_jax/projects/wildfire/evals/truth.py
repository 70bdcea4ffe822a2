"""What is true of a whole set, and the figures of scores against it.

A pixel is predicted where its score is at least the threshold. Everything is exact, with ties, and counts pixels of a
whole set: the mean over batches of a precision is another number.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple, Self

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


class Truth(NamedTuple):
    """The next masks of a set, in the order of its source. Scores of a set have the shape [N, H, W], too."""

    target: np.ndarray  # bool [N, H, W]
    known: np.ndarray  # bool [N, H, W], pixels that count
    new: np.ndarray  # bool [N, H, W], those of them that do not burn in the last frame
    fire: np.ndarray  # [N], number of the fire

    @classmethod
    def empty(cls, spec: Mapping[str, Any], length: int) -> Self:
        """Returns room for a set of elements of this spec."""
        height, width, _ = spec["target"].shape
        target, known, new = np.zeros((3, length, height, width), bool)
        return cls(target, known, new, np.zeros(length, np.int64))

    def fill(self, indices: np.ndarray, batch: Mapping[str, np.ndarray]) -> None:
        """Writes down the truth of a batch, whose elements have these indices."""
        known = batch["known"][..., 0]
        self.target[indices], self.known[indices] = batch["target"][..., 0], known
        self.new[indices] = known & ~last_frame(batch)
        self.fire[indices] = batch["fire_id"]

    @property
    def fires(self) -> np.ndarray:
        """The numbers of all fires, ascending."""
        return np.unique(self.fire)

    def ranking(self, scores: np.ndarray, *, new: bool = False) -> Ranking:
        """Returns how scores rank the known pixels, or only the `new` ones: those that do not burn yet."""
        counted = self.new if new else self.known
        return Ranking.of(scores[counted], self.target[counted])


def last_frame(batch: Mapping[str, np.ndarray]) -> np.ndarray:
    """Returns the last masks of the histories [B, H, W]; padding comes first, so the last frame is never padding."""
    return np.asarray(batch["fire"])[:, -1, ..., 0]


def ranking_figures(scores: np.ndarray, truth: Truth) -> dict[str, float | None]:
    """Returns the average precision over all known pixels, and over those that do not burn yet."""
    return {
        "average_precision": average_precision(truth.ranking(scores)),
        "new_average_precision": average_precision(truth.ranking(scores, new=True)),
    }


def mask_figures(scores: np.ndarray, truth: Truth, threshold: float) -> dict[str, float | None]:
    """Returns average precisions, and precision, recall, F1 and IoU at a threshold."""
    return ranking_figures(scores, truth) | threshold_figures(
        scores[truth.known] >= threshold, truth.target[truth.known]
    )


def chosen_threshold(scores: np.ndarray, truth: Truth) -> float | None:
    """Returns the threshold with the highest F1 over all known pixels; None if none is positive."""
    return best_threshold(truth.ranking(scores))
