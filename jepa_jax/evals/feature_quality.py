"""Judges a feature space without labels: its spectrum, ranks and correlations, and whether it collapsed."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jepa_jax.config.augment import AugmentConfig
from jepa_jax.data.augment import augment_planes, draw, levels
from jepa_jax.data.contract import Source, sample
from jepa_jax.evals.collapse import collapse_warning, effective_rank, feature_spread, singular_values
from jepa_jax.evals.evaluators import EncoderEvaluator, Evaluator, Figures, Moment, Stage
from jepa_jax.evals.features import OnCount, part_of
from jepa_jax.evals.inference import QUALITY_IMAGES, FrozenEncoder
from jepa_jax.program.step import TrainState, evaluated_variables

RANKME_EPSILON = 1e-7  # as in the paper: for float32 features
SMALLEST_SINGULAR = 1e-6  # of the largest: below it, the spectrum of float32 features is rounding noise
LIDAR_REGULARISER = 1e-4
WATCHED_IMAGES = 1024  # test images that the collapse watch looks at


class FeatureQuality(EncoderEvaluator):
    """Spectrum, ranks and correlations of features, LiDAR, and whether they collapsed."""

    title = "feature quality"
    needs_labels = False
    has_reference = False

    def measure(self, encoder: FrozenEncoder, level: int, start: OnCount) -> Figures:
        features = encoder.test_features(level).features
        figures = feature_quality(features[sample(len(features), QUALITY_IMAGES)], encoder.raw_features(level).features)
        return figures | self.lidar(encoder, level, start)

    def lidar(self, encoder: FrozenEncoder, level: int, start: OnCount) -> Figures:
        """Returns LiDAR of augmented views of test images, None where views are not random, and their numbers."""
        limits, augment = self.context.limits, self.context.config.data.augment
        is_random = "image" in encoder.test.spec and augment.is_random
        images, views = min(limits.lidar_images, len(encoder.test)) if is_random else 0, limits.lidar_views
        figures: Figures = {"lidar": None, "lidar_images": images, "lidar_views": views}
        if not images:
            return figures
        start(images * views)
        source = ViewSource(augment, part_of(encoder.test, images), views)
        split = encoder.store.get(
            f"level{level}_views_{images}x{views}",
            lambda: encoder.extract(source, level, on_images=self.context.progress.advance),
        )
        return figures | {"lidar": lidar(split.features.reshape(images, views, -1))}

    def in_words(self, figures: Figures) -> str:
        return figures["collapse"] or f"effective rank {figures['effective_rank']:.1f} of {figures['dimensions']:.0f}"


class ViewSource:
    """Augmented views of all images of a source; view v of image i is element i * views + v, whatever the batch."""

    def __init__(self, augment: AugmentConfig, source: Source, views: int):
        self._augment, self._source, self._views = augment, source, views
        height, width, channels = source.spec["image"].shape
        shape = (augment.crop.size or height, augment.crop.size or width, channels)
        self.classes, self.spec = source.classes, {**source.spec, "image": jax.ShapeDtypeStruct(shape, np.uint8)}

    def __len__(self) -> int:
        return len(self._source) * self._views

    def batch(self, indices: np.ndarray) -> dict[str, Any]:
        images, places = np.unique(indices // self._views, return_inverse=True)  # an image is read once per batch
        batch = self._source.batch(images)
        repeated = {name: batch[name][places] for name in self.spec}
        return repeated | {"image": np.asarray(_views(indices, repeated["image"], self._augment))}


@functools.partial(jax.jit, static_argnames="augment")
def _views(numbers: jax.Array, images: jax.Array, augment: AugmentConfig) -> jax.Array:
    """Returns a random view of each image, in uint8, which encoders take; `numbers` are the seeds."""
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(0), numbers)
    draws = jax.vmap(lambda key: draw(key, ()))(keys)
    planes = augment_planes(draws, jnp.swapaxes(levels(images), 2, 3), augment)
    return jnp.clip(jnp.stack(planes, axis=-1) + 0.5, 0, 255).astype(jnp.uint8)


class CollapseWatch(Evaluator):
    """How far features spread, which needs no labels.

    Looks at features before their last normalisation; at the end also at LiDAR, of features as they are used.
    """

    group = "collapse"
    logs_untrained = True

    def due(self, moment: Moment) -> bool:
        return True

    def run(self, state: TrainState, moment: Moment) -> Figures:
        encoder, progress = self.context.encoder_at(state, moment), self.context.progress
        progress.start("collapse watch", min(WATCHED_IMAGES, len(encoder.test)))
        spread = feature_spread(encoder.raw_features(0, WATCHED_IMAGES, progress.advance).features)
        if moment.stage != Stage.FINAL:
            return spread
        measured = FeatureQuality(self.context).lidar(encoder, 0, functools.partial(progress.start, "LiDAR"))
        return {"effective_rank": spread["effective_rank"], "lidar": measured["lidar"]}

    def in_words(self, figures: Figures) -> str:
        return ""

    def warning(self, figures: Figures, untrained: Mapping[str, Any] | None) -> str | None:
        return collapse_warning(figures, untrained)


class ContextAndTarget(Evaluator):
    """Mean standard deviation of the features of a context encoder and of its slow copy, after epochs.

    Of the images of the collapse watch and, as there, before the last normalisation.
    """

    group = "collapse"

    def due(self, moment: Moment) -> bool:
        return moment.stage == Stage.EPOCH and self.context.program.method.ema is not None

    def run(self, state: TrainState, moment: Moment) -> Figures:
        evaluated, progress = self.context.encoder_at(state, moment), self.context.progress
        figures: Figures = {}
        for name, weights in (("context_std", "online"), ("target_std", "target")):
            is_evaluated = weights == self.context.config.eval.weights
            encoder = evaluated if is_evaluated else evaluated.with_weights(*evaluated_variables(state, weights))
            progress.start("spread of context and target", min(WATCHED_IMAGES, len(encoder.test)))
            features = encoder.raw_features(0, WATCHED_IMAGES, progress.advance).features
            figures[name] = feature_spread(features)["std_mean"]
        return figures

    def in_words(self, figures: Figures) -> str:
        return ""


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
