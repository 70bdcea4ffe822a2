"""Judges a feature space without labels: its spectrum, ranks and correlations, and whether it collapsed.

A collapse is looked for in features *before* their last normalisation: a layer norm gives even a nearly constant
encoder features of full length and spread.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jepa_jax.config.augment import AugmentConfig
from jepa_jax.config.groups import Config
from jepa_jax.data.augment import augment_planes, draw, levels
from jepa_jax.data.contract import Source, sample
from jepa_jax.evals.evaluators import EncoderEvaluator, EvaluationContext, Evaluator, Figures, Moment, Stage
from jepa_jax.evals.features import OnCount, part_of
from jepa_jax.evals.inference import QUALITY_IMAGES, FrozenEncoder
from jepa_jax.evals.neighbours import MAPPED, pca, shown_places, small_copies
from jepa_jax.methods.contract import ViewMethod
from jepa_jax.program.step import TrainState, evaluated_variables

RANKME_EPSILON = 1e-7  # as in the paper: for float32 features
SMALLEST_SINGULAR = 1e-6  # of the largest: below it, the spectrum of float32 features is rounding noise
LIDAR_REGULARISER = 1e-4
WATCHED_IMAGES = 1024  # training images that the collapse watch looks at: it may end a run
DrawViews = Callable[[Mapping[str, Any], jax.Array], Mapping[str, Any]]  # batch, a key per element -> batch of views

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


class FeatureQuality(EncoderEvaluator):
    title = "feature quality"
    needs = ""
    has_reference = False

    def measure(self, encoder: FrozenEncoder, level: int, start: OnCount) -> Figures:
        features = encoder.test_features(level).features
        figures = feature_quality(features[sample(len(features), QUALITY_IMAGES)], encoder.raw_features(level).features)
        return figures | self.lidar(encoder, level, start)

    def lidar(self, encoder: FrozenEncoder, level: int, start: OnCount) -> Figures:
        """Returns LiDAR of random views of test elements, None where views are not random, and their numbers."""
        limits, draw_view = self.context.limits, view_function(encoder)
        images, views = min(limits.lidar_images, len(encoder.test)) if draw_view else 0, limits.lidar_views
        figures: Figures = {"lidar": None, "lidar_images": images, "lidar_views": views}
        if not images or draw_view is None:
            return figures
        start(images * views)
        source = ViewSource(draw_view, part_of(encoder.test, images), views)
        split = encoder.store.get(
            f"level{level}_views_{images}x{views}",
            lambda: encoder.extract(source, level, on_images=self.context.progress.advance),
        )
        of_views = split.features.reshape(images, views, -1)
        return figures | {"lidar": lidar(of_views)} | alignment_and_uniformity(of_views)

    def in_words(self, figures: Figures) -> str:
        return figures["collapse"] or f"effective rank {figures['effective_rank']:.1f} of {figures['dimensions']:.0f}"


def view_function(encoder: FrozenEncoder) -> DrawViews | None:
    """Returns what draws a random view of each element of a batch; None if the method has no random views."""
    method, augment = encoder.program.method, encoder.config.data.augment
    if isinstance(method, ViewMethod):
        return jax.jit(lambda batch, keys: method.random_views(batch, keys))
    if "image" in encoder.test.spec and augment.is_random:
        return lambda batch, keys: {**batch, "image": _image_views(keys, batch["image"], augment)}
    return None


class ViewSource:
    """Random views of all elements of a source; view v of element i is element i * views + v, whatever the batch."""

    def __init__(self, draw_views: DrawViews, source: Source, views: int):
        self._draw, self._source, self._views, self.classes = draw_views, source, views, source.classes
        first = self.batch(np.zeros(1, np.int64))
        self.spec = {name: jax.ShapeDtypeStruct(array.shape[1:], array.dtype) for name, array in first.items()}

    def __len__(self) -> int:
        return len(self._source) * self._views

    def batch(self, indices: np.ndarray) -> dict[str, Any]:
        elements, places = np.unique(indices // self._views, return_inverse=True)  # an element is read once per batch
        batch = self._source.batch(elements)
        repeated = {name: batch[name][places] for name in self._source.spec}
        keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(0), indices)  # the numbers are the seeds
        return {name: np.asarray(array) for name, array in self._draw(repeated, keys).items()}


@functools.partial(jax.jit, static_argnames="augment")
def _image_views(keys: jax.Array, images: jax.Array, augment: AugmentConfig) -> jax.Array:
    """Returns a random view of each image, in uint8, which encoders take."""
    draws = jax.vmap(lambda key: draw(key, ()))(keys)
    planes = augment_planes(draws, jnp.swapaxes(levels(images), 2, 3), augment)
    return jnp.clip(jnp.stack(planes, axis=-1) + 0.5, 0, 255).astype(jnp.uint8)


class CollapseWatch(Evaluator):
    """How far features spread, which needs no labels.

    Looks at features of training images before their last normalisation, since a run may end by what it finds; at the
    end also at LiDAR of test images, of features as they are used.
    """

    FINAL_FIGURES = ("effective_rank", "lidar", "alignment", "uniformity")
    group = "collapse"
    logs_untrained = True

    def __init__(self, context: EvaluationContext):
        super().__init__(context)
        self._nearest: dict[str, np.ndarray] = {}  # stage -> places of images and their nearest ones
        self._maps: dict[str, np.ndarray] = {}  # stage -> coordinates [N, 2] of images

    @classmethod
    def fields(cls, config: Config, *, finished: bool, warning: str | None) -> Figures:
        return {"collapse_warning": warning} | dict.fromkeys(cls.FINAL_FIGURES if finished else ())

    def due(self, moment: Moment) -> bool:
        return True

    def elements(self, moment: Moment) -> int:
        watched, crop = min(WATCHED_IMAGES, len(self.context.train)), self.context.config.data.augment.crop.size
        if moment.stage != Stage.FINAL or "image" not in self.context.test.spec:
            return watched
        limits, height = self.context.limits, self.context.test.spec["image"].shape[0]
        views = min(limits.lidar_images, len(self.context.test)) * limits.lidar_views
        return watched + round(views * ((crop or height) / height) ** 2)  # a smaller view costs less

    def run(self, state: TrainState, moment: Moment) -> Figures:
        encoder, progress = self.context.encoder_at(state, moment), self.context.progress
        progress.start("collapse watch", min(WATCHED_IMAGES, len(encoder.train)))
        features = encoder.raw_features(0, WATCHED_IMAGES, progress.advance, split="train").features
        spread = feature_spread(features)
        if "image" in encoder.train.spec and moment.stage != Stage.EPOCH and np.isfinite(features).all():
            self._nearest[moment.stage.value] = shown_places(features)
            self._maps[f"{moment.stage.value}_map"] = pca(features)[0][sample(len(features), MAPPED)]
        if moment.stage != Stage.FINAL:
            return spread
        measured = FeatureQuality(self.context).lidar(encoder, 0, functools.partial(progress.start, "LiDAR"))
        return {"effective_rank": spread["effective_rank"]} | {key: measured.get(key) for key in self.FINAL_FIGURES[1:]}

    def exhibits(self) -> Mapping[str, np.ndarray]:
        """Returns neighbours and a map of watched images, trained and, unless the run was resumed, untrained."""
        if not self._nearest:
            return {}
        watched = part_of(self.context.train, WATCHED_IMAGES)
        mapped = sample(len(watched), MAPPED)
        exhibits = {stage: small_copies(watched, places) for stage, places in self._nearest.items()}
        exhibits |= self._maps | {"mapped": small_copies(watched, mapped)}
        if not watched.classes:
            return exhibits
        labels = np.asarray(watched.batch(mapped)["label"])
        return exhibits | {"mapped_labels": labels, "classes": np.array(watched.classes)}

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

    def elements(self, moment: Moment) -> int:
        return 2 * min(WATCHED_IMAGES, len(self.context.train))

    def run(self, state: TrainState, moment: Moment) -> Figures:
        evaluated, progress = self.context.encoder_at(state, moment), self.context.progress
        figures: Figures = {}
        for name, weights in (("context_std", "online"), ("target_std", "target")):
            is_evaluated = weights == self.context.config.eval.weights
            encoder = evaluated if is_evaluated else evaluated.with_weights(*evaluated_variables(state, weights))
            progress.start("spread of context and target", min(WATCHED_IMAGES, len(encoder.train)))
            features = encoder.raw_features(0, WATCHED_IMAGES, progress.advance, split="train").features
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
            f"features are nearly constant: they differ by {spread:.2%} of their length{before}; raise the "
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


def components_for(eigenvalues: np.ndarray, part: float) -> int:
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


def alignment_and_uniformity(views: np.ndarray) -> dict[str, float]:
    """Returns how far views of an image lie apart, and how evenly images lie on the sphere (Wang and Isola 2020).

    Of features [images, views, D] scaled to length 1: the mean squared distance of the first two views of an image (0
    to 4), and the logarithm of the mean of exp(-2 d^2) over pairs of images (0 if all are alike; smaller is more even).
    """
    unit = views[:, :2] / np.maximum(np.linalg.norm(views[:, :2], axis=-1, keepdims=True), 1e-12)
    first = unit[:, 0].astype(np.float64)
    squared = np.maximum(2 - 2 * first @ first.T, 0)[np.triu_indices(len(first), 1)]
    uniformity = float(np.log(np.mean(np.exp(-2 * squared)))) if len(squared) else 0.0
    return {"alignment": float(np.mean(np.sum((unit[:, 0] - unit[:, -1]) ** 2, axis=-1))), "uniformity": uniformity}


def lidar(views: np.ndarray) -> float | None:
    """Returns the effective rank of the LDA matrix whose classes are images (Thilak et al. 2024).

    The matrix is S_w^-1/2 S_b S_w^-1/2 with S_b the covariance of the images' means and S_w that of views around them;
    S_w is regularised with 1e-4 of its mean variance (the paper: 1e-4), so that the figure does not depend on the
    features' scale. None if the views of every image are the same.
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
