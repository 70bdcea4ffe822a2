"""Linear probe: multinomial logistic regression on frozen, standardised features, solved to its optimum.

The problem is convex: L-BFGS reaches what SGD approaches in 100 epochs, so there is no rate, seed or epoch to choose.
The only free number, the weight penalty, is chosen on a part of the *training* set; the test set is used once.
"""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jepa_jax.evals.features import OnCount, Split, held_out_split, ignore

PENALTIES = (1e-5, 1e-4, 1e-3, 1e-2)
ITERATIONS = 60
FITS = len(PENALTIES) + 1  # that a probe solves, for a progress bar

Weights = Mapping[str, Any]  # "kernel" [F, classes] and "bias" [classes]


class ProbeResult(NamedTuple):
    """Accuracies in percent on the test split, and the penalty that the held-out part chose."""

    accuracy: float
    penalty: float
    held_out_accuracy: float
    top5_accuracy: float
    confusion: np.ndarray  # [true, predicted], images of the test split


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


def linear_probe(train: Split, test: Split, num_classes: int, on_fit: OnCount = ignore) -> ProbeResult:
    """Fits on `train` and scores on `test`; calls `on_fit(1)` after each of FITS fits."""
    standard = Standard.of(train.features)
    x_train, x_test = standard(train.features), standard(test.features)
    penalty, held_out_accuracy, weights = choose_penalty(x_train, train.labels, num_classes, on_fit)
    weights = fit_softmax(x_train, train.labels, num_classes, penalty, weights)
    logits = probe_logits(weights, x_test)
    on_fit(1)
    return ProbeResult(
        top1(weights, x_test, test.labels),
        penalty,
        held_out_accuracy,
        top_k(logits, test.labels, 5),
        confusion_matrix(test.labels, np.argmax(logits, axis=1), num_classes),
    )


def choose_penalty(
    x: np.ndarray, labels: np.ndarray, num_classes: int, on_fit: OnCount = ignore
) -> tuple[float, float, Weights]:
    """Returns the best penalty on the held-out part, its accuracy there in percent, and weights fitted on the rest."""
    fit_part, score_part = held_out_split(len(x))
    scores, weights = [], None
    for penalty in sorted(PENALTIES, reverse=True):  # the strongest first: each solution starts the next one
        weights = fit_softmax(x[fit_part], labels[fit_part], num_classes, penalty, weights)
        scores.append((top1(weights, x[score_part], labels[score_part]), penalty, weights))
        on_fit(1)
    accuracy, penalty, best = max(scores, key=lambda entry: entry[0])
    return penalty, accuracy, best


def fit_softmax(
    x: np.ndarray,
    labels: np.ndarray,
    num_classes: int,
    penalty: float,
    start: Weights | None = None,
    iterations: int = ITERATIONS,
) -> Weights:
    """Minimises mean cross-entropy + penalty / 2 |kernel|^2 with L-BFGS; x: [N, F]."""
    if start is None:
        start = {"kernel": jnp.zeros((x.shape[1], num_classes)), "bias": jnp.zeros(num_classes)}
    return _lbfgs(start, jnp.asarray(x, jnp.float32), jnp.asarray(labels, jnp.int32), penalty, iterations)


@functools.partial(jax.jit, static_argnames="iterations")
def _lbfgs(weights: Weights, x: jax.Array, labels: jax.Array, penalty: float, iterations: int) -> Weights:
    def objective(w: Weights) -> jax.Array:
        loss = optax.softmax_cross_entropy_with_integer_labels(x @ w["kernel"] + w["bias"], labels)
        return jnp.mean(loss) + penalty / 2 * jnp.sum(jnp.square(w["kernel"]))

    solver = optax.lbfgs(memory_size=10)
    value_and_grad = optax.value_and_grad_from_state(objective)

    def iterate(carry: tuple[Any, Any], _: None) -> tuple[tuple[Any, Any], None]:
        weights, state = carry
        value, grad = value_and_grad(weights, state=state)
        updates, state = solver.update(grad, state, weights, value=value, grad=grad, value_fn=objective)
        return (optax.apply_updates(weights, updates), state), None

    (weights, _), _ = jax.lax.scan(iterate, (weights, solver.init(weights)), length=iterations)
    return weights


def probe_logits(weights: Weights, x: np.ndarray) -> np.ndarray:
    return np.asarray(x, np.float32) @ np.asarray(weights["kernel"]) + np.asarray(weights["bias"])


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
