"""What is true of a whole set, and the figures of scores against it."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Self

import numpy as np

from jepa_jax.projects.wildfire.evals.ranking import Ranking, average_precision, best_threshold, threshold_figures


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
