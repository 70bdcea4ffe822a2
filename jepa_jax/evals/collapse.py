"""Detects collapsed encoders from features *before* their last normalisation, and names what collapsed.

A layer norm gives even a nearly constant encoder features of full length and spread, so normalised features do not show
a collapse.
"""

from collections.abc import Mapping

import numpy as np

# Features are nearly constant if those of different images differ by less than this part of their length.
LEAST_SPREAD = 0.01
# Directions in use; a low bar, as untrained encoders, which see mostly colour, use few as well.
LEAST_RANK = 3.0
# The other sign: figures that are both small and a small part of those before training.
LEAST_SPREAD_OF_INITIAL, SMALL_SPREAD = 0.25, 0.2
LEAST_RANK_OF_INITIAL, SMALL_RANK = 0.25, 6.0
# Mean absolute correlation between two dimensions; independent ones have about 0.8 / sqrt(images).
MOST_CORRELATION = 0.9
# Float32 features carry rounding noise of about 1e-7 of their size: below this, variance is noise.
ROUNDING = 1e-6


def feature_spread(features: np.ndarray) -> dict[str, float]:
    """Measures how far features [N, D] spread, in how many directions, and how redundant their dimensions are.

    Returns:
      std_mean, std_min: mean and minimum of the dimensions' standard deviations.
      relative_spread: sqrt(sum of variances / mean squared length); 0 = constant, 1 = centred at the origin.
      effective_rank: exp of the entropy of the normalised singular values (RankMe, centred); 1 to min(N - 1, D).
      mean_abs_correlation: mean over all pairs of dimensions that vary.
      dimensions: D.
    """
    x = np.asarray(features, np.float64)
    if not np.isfinite(x).all():
        names = ("std_mean", "std_min", "relative_spread", "effective_rank", "mean_abs_correlation")
        return dict.fromkeys(names, float("nan")) | {"dimensions": float(x.shape[1])}
    mean_squared_length = float(np.mean(np.sum(x * x, axis=1)))
    x = x - x.mean(axis=0)
    std = x.std(axis=0)
    return {
        "std_mean": float(std.mean()),
        "std_min": float(std.min()),
        "relative_spread": float(np.sqrt(np.sum(std**2) / mean_squared_length)) if mean_squared_length else 0.0,
        "effective_rank": effective_rank(singular_values(x)),
        "mean_abs_correlation": mean_abs_correlation(x),
        "dimensions": float(x.shape[1]),
    }


def singular_values(x: np.ndarray) -> np.ndarray:
    """Returns the singular values of [N, D], largest first, from the smaller Gram matrix (5x as fast as an SVD)."""
    gram = x @ x.T if x.shape[0] < x.shape[1] else x.T @ x
    return np.sqrt(np.maximum(np.linalg.eigvalsh(gram)[::-1], 0.0))


def effective_rank(singular: np.ndarray) -> float:
    """Returns exp(-sum p log p) with p = singular values / their sum; 1 for a matrix of zeros."""
    total = singular.sum()
    if total == 0:
        return 1.0
    p = singular[singular > 0] / total
    return float(np.exp(-np.sum(p * np.log(p))))


def mean_abs_correlation(centred: np.ndarray) -> float:
    """Returns the mean |correlation| over pairs of dimensions of centred features [N, D]; 0 if fewer than two vary."""
    std = centred.std(axis=0)
    varying = std > ROUNDING * max(float(std.max(initial=0.0)), 1e-300)
    count = int(varying.sum())
    if count < 2:
        return 0.0
    z = (centred[:, varying] / std[varying]).astype(np.float32)
    correlation = np.abs(z.T @ z / len(z))
    return float((correlation.sum(dtype=np.float64) - np.trace(correlation)) / (count * (count - 1)))


def collapse_warning(figures: Mapping[str, float], initial: Mapping[str, float] | None = None) -> str | None:
    """Returns what collapsed, its figure and what to try; None for healthy features.

    `initial` are the figures of the same encoder before training, if known: they show a loss of spread or rank before
    the absolute limits are reached.
    """

    def fell(name: str, part: float, small: float) -> bool:
        return initial is not None and figures[name] < min(small, part * initial[name])

    spread, rank = figures["relative_spread"], figures["effective_rank"]
    correlation, dimensions = figures["mean_abs_correlation"], int(figures["dimensions"])
    if not np.isfinite(spread):
        return "features are not finite: lower config.optim.lr, or clip gradients with config.optim.clip_norm"
    before = "" if initial is None else f", {initial['relative_spread']:.2%} before training"
    if spread < LEAST_SPREAD or fell("relative_spread", LEAST_SPREAD_OF_INITIAL, SMALL_SPREAD):
        return (
            f"features are nearly constant: images differ by {spread:.2%} of the features' length{before}; raise the "
            "weight of the variance or SIGReg term, use an EMA target, or lower config.optim.lr"
        )
    before = "" if initial is None else f", {initial['effective_rank']:.1f} before training"
    few = min(LEAST_RANK, 0.5 * dimensions)  # an encoder of 4 numbers cannot use more
    if rank < few or fell("effective_rank", LEAST_RANK_OF_INITIAL, SMALL_RANK):
        return (
            f"features lie in a handful of directions: effective rank {rank:.1f} of {dimensions}{before}; raise the "
            "weight of the covariance or SIGReg term, use stronger augmentation or masking, or a lower config.optim.lr"
        )
    if correlation > MOST_CORRELATION:
        return (
            f"dimensions repeat each other: mean absolute correlation {correlation:.2f} over {dimensions} dimensions; "
            "raise the weight of the covariance term, or use a larger batch"
        )
    return None
