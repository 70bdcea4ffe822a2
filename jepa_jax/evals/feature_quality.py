"""Judges a feature space without labels: its spectrum, ranks and correlations, and whether it collapsed."""

from typing import Any

import numpy as np

from jepa_jax.evals.collapse import collapse_warning, effective_rank, feature_spread, singular_values

RANKME_EPSILON = 1e-7  # as in the paper: for float32 features
SMALLEST_SINGULAR = 1e-6  # of the largest: below it, the spectrum of float32 features is rounding noise
LIDAR_REGULARISER = 1e-4


def feature_quality(features: np.ndarray, raw: np.ndarray | None = None) -> dict[str, Any]:
    """Measures features [N, D]; looks for a collapse also in `raw`, the features before their last normalisation.

    Returns, besides the figures of `feature_spread`:
      rank_ratio: effective rank over the largest it can be, min(N - 1, D).
      components_99: principal components that hold 99 % of the variance.
      variance_mean, variance_min, variance_max: over dimensions.
      rankme, alpha_req: see the functions.
      spectrum: singular values of the centred features above rounding noise, largest first.
      raw: `feature_spread` of `raw`.
      collapse: what collapsed, in words; or None.
    """
    figures, raw_figures = feature_spread(features), feature_spread(features if raw is None else raw)
    x = np.asarray(features, np.float64)
    centred = singular_values(x - x.mean(axis=0))
    eigenvalues = centred**2 / len(x)
    variance = x.var(axis=0)
    return {
        **figures,
        "rank_ratio": figures["effective_rank"] / max(1, min(len(x) - 1, x.shape[1])),
        "components_99": components_for(eigenvalues, 0.99),
        "variance_mean": float(variance.mean()),
        "variance_min": float(variance.min()),
        "variance_max": float(variance.max()),
        "rankme": rankme(singular_values(x)),
        "alpha_req": alpha_req(eigenvalues),
        "images": len(x),
        "spectrum": [float(f"{value:.5g}") for value in centred if value > SMALLEST_SINGULAR * centred[0]],
        "raw": raw_figures,
        "collapse": collapse_warning(raw_figures) or collapse_warning(figures),
    }


def components_for(eigenvalues: np.ndarray, part: float) -> int:
    """Returns how many of the largest eigenvalues hold this part of their sum."""
    total = eigenvalues.sum()
    if total == 0:
        return 0
    return min(len(eigenvalues), int(np.searchsorted(np.cumsum(eigenvalues) / total, part - 1e-12)) + 1)


def rankme(singular: np.ndarray) -> float:
    """Returns exp of the entropy of p = sigma / |sigma|_1 + 1e-7, features not centred (Garrido et al. 2023)."""
    p = singular / max(float(singular.sum()), 1e-300) + RANKME_EPSILON
    return float(np.exp(-np.sum(p * np.log(p))))


def alpha_req(eigenvalues: np.ndarray) -> float | None:
    """Returns alpha of the power law lambda_i ~ i^-alpha, fitted in logarithms (Agrawal et al. 2022).

    None with fewer than 3 eigenvalues above rounding noise.
    """
    usable = eigenvalues[eigenvalues > SMALLEST_SINGULAR**2 * max(float(eigenvalues.max(initial=0)), 1e-300)]
    if len(usable) < 3:
        return None
    slope, _ = np.polyfit(np.log(np.arange(1, len(usable) + 1)), np.log(usable), 1)
    return float(-slope)


def lidar(views: np.ndarray) -> float | None:
    """Returns the effective rank of the LDA matrix whose classes are images (Thilak et al. 2024).

    The matrix is S_w^-1/2 S_b S_w^-1/2 with S_b the covariance of the images' means and S_w that of views around them;
    S_w is regularised with 1e-4 of its mean variance (the paper: 1e-4), so that the figure does not depend on the
    features' scale. None if the views of every image are the same.

    Args:
      views: features [images, views, D].
    """
    x = np.asarray(views, np.float64)
    images, per_image, dimensions = x.shape
    means = x.mean(axis=1)
    within = (x - means[:, None]).reshape(-1, dimensions)
    within_variance = np.sum(within**2) / (images * (per_image - 1)) / dimensions
    between = means - means.mean(axis=0)
    if within_variance <= 1e-12 * max(float(np.mean(between**2)), 1e-300):
        return None
    covariance = within.T @ within / (images * (per_image - 1))
    covariance += LIDAR_REGULARISER * within_variance * np.eye(dimensions)
    # The eigenvalues of S_w^-1/2 S_b S_w^-1/2 are the squared singular values of the whitened means.
    eigenvalues, vectors = np.linalg.eigh(covariance)
    whitened = between @ (vectors / np.sqrt(eigenvalues))
    return effective_rank(singular_values(whitened) ** 2)
