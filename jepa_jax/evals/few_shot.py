"""Few-shot episodes on frozen features: a class is the mean of its few examples, a query goes to the nearest class."""

from typing import Any

import numpy as np

from jepa_jax.base.statistics import NORMAL_95
from jepa_jax.evals.evaluators import EncoderEvaluator, Figures
from jepa_jax.evals.features import OnCount, Split, ignore
from jepa_jax.evals.inference import FrozenEncoder
from jepa_jax.evals.knn import unit_length

WAYS, SHOTS, QUERIES, EPISODES = 5, (1, 5, 10), 15, 100


class FewShot(EncoderEvaluator):
    title = "few-shot"

    def measure(self, encoder: FrozenEncoder, level: int, start: OnCount) -> Figures:
        start(len(SHOTS))
        result = few_shot(encoder.test_features(level), self.context.progress.advance)
        return result | {"chance": 100 / result["ways"] if result["ways"] else None}

    def in_words(self, figures: Figures) -> str:
        shots = [f"{v['accuracy']:.1f} ± {v['interval_95']:.1f} % ({k}-shot)" for k, v in figures["shots"].items()]
        return ", ".join(shots) or "too few images per class"


def few_shot(split: Split, on_shots: OnCount = ignore) -> dict[str, Any]:
    """Returns mean accuracy in percent and its 95 % interval for each number of shots, over random episodes.

    Features are scaled to unit length. A split too small for the protocol gets fewer ways or queries, which the result
    states; numbers of shots that leave no query are left out.
    """
    members = [np.flatnonzero(split.labels == label) for label in np.unique(split.labels)]
    sizes, ways = sorted(map(len, members)), min(WAYS, len(members))
    features = unit_length(split.features)
    result: dict[str, Any] = {"ways": ways, "episodes": EPISODES, "images": len(split.labels), "shots": {}}
    for shot in SHOTS:
        asked = min(QUERIES, sizes[-ways] - shot)  # as many as `ways` classes have
        if ways >= 2 and asked >= 1:
            usable = [indices for indices in members if len(indices) >= shot + asked]
            rng = np.random.default_rng([0, shot])
            drawn = draw_episodes(rng, usable, ways, shot + asked, EPISODES)
            accuracy, half_width = mean_interval(episode_accuracies(features[drawn], shot))
            result["shots"][str(shot)] = {"accuracy": accuracy, "interval_95": half_width, "queries": asked}
        on_shots(1)
    return result


def draw_episodes(
    rng: np.random.Generator, members: list[np.ndarray], ways: int, images: int, episodes: int
) -> np.ndarray:
    """Returns image numbers [episodes, ways, images]; no class twice per episode, no image twice per class."""
    drawn = [
        [rng.choice(members[c], images, replace=False) for c in rng.choice(len(members), ways, replace=False)]
        for _ in range(episodes)
    ]
    return np.array(drawn)


def episode_accuracies(features: np.ndarray, shot: int) -> np.ndarray:
    """Returns accuracies in 0..1; features [E, ways, shot + queries, D], the first `shot` are the examples."""
    episodes, ways, images, _ = features.shape
    centroids = features[:, :, :shot].mean(axis=2)  # [E, ways, D]
    queries = features[:, :, shot:].reshape(episodes, ways * (images - shot), -1)
    # |q - c|^2 without |q|^2, which is the same for every class
    distance = np.sum(centroids**2, axis=-1)[:, None] - 2 * queries @ np.swapaxes(centroids, 1, 2)
    right = np.argmin(distance, axis=-1) == np.repeat(np.arange(ways), images - shot)
    return right.mean(axis=1)


def mean_interval(accuracies: np.ndarray) -> tuple[float, float]:
    """Returns the mean in percent and half the width of its 95 % interval, 1.96 s / sqrt(n)."""
    half_width = NORMAL_95 * float(np.std(accuracies, ddof=1)) / np.sqrt(len(accuracies))
    return 100 * float(np.mean(accuracies)), 100 * half_width
