"""Linear probe: multinomial logistic regression on frozen, standardised features, solved to its optimum.

The problem is convex: L-BFGS iterates until what is left to gain is negligible, so there is no rate, seed or number of
epochs to choose. The only free number, the weight penalty, is chosen on a part of the *training* set; the test set is
used once.
"""

import operator
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg
import scipy.optimize
from threadpoolctl import threadpool_limits

from jepa_jax.base.errors import UserError
from jepa_jax.evals.evaluators import EncoderEvaluator, Figures
from jepa_jax.evals.features import OnCount, Split, accuracy_figures, check_classes, held_out_split, ignore
from jepa_jax.evals.inference import FrozenEncoder

PENALTIES = (1e-5, 1e-4, 1e-3, 1e-2)  # further ones, up to
WEAKEST, STRONGEST = 1e-7, 1e2  # these, while the best one is the last that was tried
FITS = len(PENALTIES) + 1  # that a probe solves, for a progress bar
TOLERANCE = 1e-6  # of the objective: what a solution may leave to gain, as a quadratic model estimates it
CLEARLY_WORSE = 0.5  # points of held-out accuracy, and no fewer than this many images:
CLEARLY_FEWER = 3
MOST_ITERATIONS = 2000  # tens are usual
LEAST_OBJECTIVE = 1e-3  # that TOLERANCE refers to: an optimum can be 0
LEAST_CURVATURE = 1e-4  # of a model that is certain of every image
GRAM_ROWS = 4096  # summed in float32; their sums in float64
LAYERS = 4  # that the probe of several reads, as DINO's of ViT-S
MOST_CLASSES = 100  # whose confusion matrix is written out

Weights = Mapping[str, Any]  # "kernel" [F, classes] and "bias" [classes]


class LinearProbe(EncoderEvaluator):
    """Accuracy of a linear probe."""

    title = "linear probe"

    def measure(self, encoder: FrozenEncoder, level: int, start: OnCount) -> Figures:
        (train, test), classes = self.features(encoder, level), len(encoder.train.classes)
        start(FITS)
        check_classes(train.labels, test.labels, encoder.train.classes)
        result = linear_probe(train, test, classes, self.context.progress.advance)
        solver = "L-BFGS; penalty, a power of ten, chosen on held-out train images"
        figures = accuracy_figures(result["accuracy"], train, test, classes) | result
        return figures | {"solver": solver, "features": train.features.shape[1]}

    def features(self, encoder: FrozenEncoder, level: int) -> tuple[Split, Split]:
        """Returns what the probe reads of both splits."""
        return encoder.features(level)


class LayersProbe(LinearProbe):
    """Accuracy of a linear probe on the features of the last layers, side by side."""

    title = "linear probe of the last layers"
    reads, has_levels = "layers", False

    def features(self, encoder: FrozenEncoder, level: int) -> tuple[Split, Split]:
        del level
        return encoder.layer_features(LAYERS)


class Fit(NamedTuple):
    """A solution of the probe, and its accuracy in percent on held-out images."""

    accuracy: float
    penalty: float
    weights: Weights


class Standard(NamedTuple):
    """Mean and inverse standard deviation of each dimension."""

    mean: np.ndarray
    scale: np.ndarray

    @classmethod
    def of(cls, features: np.ndarray) -> "Standard":
        mean, std = features.mean(0), features.std(0)
        # A dead dimension must not become noise.
        return cls(mean, 1 / np.maximum(std, 1e-6 * max(float(std.max()), 1e-12)))

    def __call__(self, features: Any) -> Any:
        return (features - self.mean) * self.scale


def linear_probe(train: Split, test: Split, num_classes: int, on_fit: OnCount = ignore) -> Figures:
    """Fits on `train` and scores on `test`, in percent; calls `on_fit(1)` after each of FITS fits.

    The confusion matrix [true, predicted] is left out of the result for more than MOST_CLASSES classes.
    """
    standard = Standard.of(train.features)
    x_train, x_test = standard(train.features), standard(test.features)
    gram = gram_matrix(x_train)
    penalty, held_out_accuracy, weights = choose_penalty(x_train, train.labels, num_classes, gram, on_fit)
    weights = fit_softmax(x_train, train.labels, num_classes, penalty, gram, weights)
    logits = probe_logits(weights, x_test)
    on_fit(1)
    figures = {
        "accuracy": top1(weights, x_test, test.labels),
        "top5_accuracy": top_k(logits, test.labels, 5),
        "penalty": penalty,
        "held_out_accuracy": held_out_accuracy,
    }
    confusion = confusion_matrix(test.labels, np.argmax(logits, axis=1), num_classes)
    return figures | ({"confusion": confusion.tolist()} if num_classes <= MOST_CLASSES else {})


def held_out_accuracy(train: Split, num_classes: int, on_fit: OnCount = ignore) -> float:
    """Returns the accuracy in percent of `linear_probe` on its held-out part; calls `on_fit(1)` per penalty."""
    x = Standard.of(train.features)(train.features)
    return choose_penalty(x, train.labels, num_classes, gram_matrix(x), on_fit)[1]


def choose_penalty(
    x: np.ndarray, labels: np.ndarray, num_classes: int, gram: np.ndarray, on_fit: OnCount = ignore
) -> tuple[float, float, Weights]:
    """Returns the best penalty on the held-out part, its accuracy there in percent, and weights fitted on the rest.

    Begins with the strongest penalty: each solution starts the next one. Once a weaker penalty is clearly worse, by
    CLEARLY_WORSE points, those below it, which take the most iterations, are left out. While the best penalty is the
    last one of either side, the one beyond it is tried too.
    """
    fit_part, score_part = held_out_split(len(x))
    x_fit = jnp.asarray(x[fit_part])
    margin = max(CLEARLY_WORSE, 100 * CLEARLY_FEWER / len(score_part))

    def fit(penalty: float, start: Weights | None) -> Fit:
        weights = fit_softmax(x_fit, labels[fit_part], num_classes, penalty, gram, start)
        return Fit(top1(weights, x[score_part], labels[score_part]), penalty, weights)

    fits = [fit(PENALTIES[-1], None)]
    on_fit(1)
    for penalty in PENALTIES[-2::-1]:
        if fits[-1].accuracy > max(fit.accuracy for fit in fits) - margin:
            fits.append(fit(penalty, fits[-1].weights))
        on_fit(1)
    best = max(fits, key=operator.attrgetter("accuracy"))
    for last, factor, limit in ((PENALTIES[-1], 10, STRONGEST), (PENALTIES[0], 0.1, WEAKEST)):
        while best.penalty == last and last != limit:
            last = float(f"{last * factor:.0e}")
            best = max(best, fit(last, best.weights), key=operator.attrgetter("accuracy"))
    return best.penalty, best.accuracy, best.weights


def gram_matrix(x: np.ndarray) -> np.ndarray:
    """Returns x' x / N [F, F] in float64, which preconditions the fits."""
    parts = (x[start : start + GRAM_ROWS] for start in range(0, len(x), GRAM_ROWS))
    gram = sum((part.T @ part).astype(np.float64) for part in parts) / len(x)
    if not np.isfinite(gram).all():
        raise UserError("linear probe: features are not finite; the encoder has diverged, train it with a lower rate")
    return gram


@threadpool_limits.wrap(limits=1, user_api="blas")  # threads that wait for each other cost more than they save here
def fit_softmax(
    x: Any, labels: np.ndarray, num_classes: int, penalty: float, gram: np.ndarray, start: Weights | None = None
) -> Weights:
    """Minimises mean cross-entropy + penalty / 2 |kernel|^2 with L-BFGS, in variables that whiten the problem.

    The Hessian of the cross-entropy is near c (I - 11' / classes) x Gram, where c is the curvature of the softmax. The
    variables are L' kernel, with L L' = c Gram + penalty I, and sqrt(c) bias, in one flat array. Iterates until what is
    `left_to_gain` is below TOLERANCE; warns if MOST_ITERATIONS do not suffice.

    Args:
      x: standardised features [N, F] in float32.
      gram: `gram_matrix` of these features, or of nearly the same ones.
      start: weights to start from; zeros if None.
    """
    x, targets = jnp.asarray(x, jnp.float32), jnp.asarray(labels, jnp.int32)
    if start is None:
        start = {"kernel": np.zeros((x.shape[1], num_classes)), "bias": np.zeros(num_classes)}
    curvature = max(float(_curvature(start, x)), LEAST_CURVATURE)
    factor = scipy.linalg.cholesky(curvature * gram + penalty * np.eye(len(gram)), lower=True)  # L [F, F]
    bias_scale, gradient = curvature**0.5, np.zeros(0)
    first = np.append(factor.T @ np.asarray(start["kernel"]), bias_scale * np.asarray(start["bias"]))

    def weights_of(variables: np.ndarray) -> Weights:
        kernel = variables[:-num_classes].reshape(-1, num_classes)
        kernel = scipy.linalg.solve_triangular(factor, kernel, lower=True, trans="T")
        return {"kernel": kernel, "bias": variables[-num_classes:] / bias_scale}

    def objective(variables: np.ndarray) -> tuple[float, np.ndarray]:
        nonlocal gradient
        weights = weights_of(variables)
        losses, kernel_slope, bias_slope = jax.device_get(_cross_entropy(weights, x, targets))
        kernel_slope = kernel_slope.T + penalty * weights["kernel"]
        kernel_slope = scipy.linalg.solve_triangular(factor, kernel_slope, lower=True)
        gradient = np.append(kernel_slope, bias_slope / bias_scale)
        return losses.mean(dtype=np.float64) + penalty / 2 * np.sum(weights["kernel"] ** 2), gradient

    def stop_when_solved(intermediate_result: scipy.optimize.OptimizeResult) -> None:
        if left_to_gain(intermediate_result.fun, gradient) <= TOLERANCE:
            raise StopIteration

    options = {"maxiter": MOST_ITERATIONS, "maxfun": 2 * MOST_ITERATIONS, "ftol": 0, "gtol": 1e-8}
    found = scipy.optimize.minimize(
        objective, first, method="L-BFGS-B", jac=True, callback=stop_when_solved, options=options
    )
    if (left := left_to_gain(found.fun, found.jac)) > TOLERANCE:
        warnings.warn(
            f"linear probe: not solved after {found.nit} iterations at penalty {penalty:g} ({found.message}); about "
            f"{left:.1g} of the objective is left to gain",
            stacklevel=2,
        )
    return weights_of(found.x)


def left_to_gain(objective: float, gradient: np.ndarray) -> float:
    """Returns which part of the objective a quadratic model with the identity as its Hessian would still gain."""
    return float(np.sum(np.square(gradient))) / 2 / max(objective, LEAST_OBJECTIVE)


@jax.jit
def _curvature(weights: Weights, x: jax.Array) -> jax.Array:
    """Returns the mean eigenvalue of diag(p) - p p', leaving out the zero of the constant direction; mean over rows."""
    p = jax.nn.softmax(x @ weights["kernel"] + weights["bias"])
    return jnp.mean(1 - jnp.sum(jnp.square(p), -1)) / max(1, p.shape[-1] - 1)


@jax.jit
def _cross_entropy(weights: Weights, x: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the cross-entropy of each row and the slopes of their mean: by kernel [classes, F], by bias [classes]."""
    log_p = jax.nn.log_softmax(jnp.dot(x, weights["kernel"], precision="highest") + weights["bias"])
    one_hot = jax.nn.one_hot(labels, log_p.shape[-1])
    # [classes, N] in memory: on CPUs the product is six times as fast as x' times [N, classes].
    residual = jax.lax.optimization_barrier(((jnp.exp(log_p) - one_hot) / len(x)).T)
    return -jnp.sum(log_p * one_hot, -1), jnp.dot(residual, x, precision="highest"), residual.sum(1)


def probe_logits(weights: Weights, x: np.ndarray) -> np.ndarray:
    kernel, bias = (np.asarray(weights[name], np.float32) for name in ("kernel", "bias"))
    return np.asarray(x, np.float32) @ kernel + bias


def top1(weights: Weights, x: np.ndarray, labels: np.ndarray) -> float:
    """Returns the percentage of rows whose largest logit is the label."""
    return 100 * float(np.mean(np.argmax(probe_logits(weights, x), axis=1) == labels))


def top_k(logits: np.ndarray, labels: np.ndarray, k: int) -> float:
    """Returns the percentage of rows whose label is among the k largest logits."""
    own = logits[np.arange(len(labels)), labels]
    return 100 * float(np.mean(np.sum(logits > own[:, None], axis=1) < k))


def confusion_matrix(labels: np.ndarray, predicted: np.ndarray, num_classes: int) -> np.ndarray:
    """Returns counts [true, predicted]."""
    flat = np.bincount(labels * num_classes + predicted, minlength=num_classes**2)
    return flat.reshape(num_classes, num_classes)
