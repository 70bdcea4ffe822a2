"""Linear probe: multinomial logistic regression on frozen, standardised features, solved to its optimum.

The problem is convex: what SGD approaches in 100 epochs, L-BFGS reaches, so there is no rate, seed or epoch to choose.
The one free number, the weight penalty, is chosen on a part of the *training* set; the test set is looked at once.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jepa_jax.evals.features import Split, held_out_split

PENALTIES = (1e-5, 1e-4, 1e-3, 1e-2)
ITERATIONS = 60
FITS = len(PENALTIES) + 1  # that a probe solves, for a progress bar


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


def linear_probe(
    train: Split, test: Split, num_classes: int, on_fit: Callable[[int], None] = lambda count: None
) -> ProbeResult:
    """Fits on `train`, scores on `test`; `on_fit` hears of each of the FITS solutions."""
    standard = Standard.of(train.features)
    x_train, x_test = standard(train.features), standard(test.features)
    penalty, held_out_accuracy, weights = choose_penalty(x_train, train.labels, num_classes, on_fit)
    weights = fit_softmax(x_train, train.labels, num_classes, penalty, weights)
    on_fit(1)
    logits = probe_logits(weights, x_test)
    return ProbeResult(
        top1(weights, x_test, test.labels),
        penalty,
        held_out_accuracy,
        top_k(logits, test.labels, 5),
        confusion_matrix(test.labels, np.argmax(logits, axis=1), num_classes),
    )


def choose_penalty(x, labels, num_classes: int, on_fit: Callable[[int], None] = lambda count: None):
    """The penalty best on the held-out part, its accuracy there in percent, and the weights fitted on the rest."""
    fit_part, score_part = held_out_split(len(x))
    scores, weights = [], None
    for penalty in sorted(PENALTIES, reverse=True):  # the strongest first: each solution starts the next one
        weights = fit_softmax(x[fit_part], labels[fit_part], num_classes, penalty, weights)
        scores.append((top1(weights, x[score_part], labels[score_part]), penalty, weights))
        on_fit(1)
    accuracy, penalty, weights = max(scores, key=lambda entry: entry[0])
    return penalty, accuracy, weights


def fit_softmax(x, labels, num_classes: int, penalty: float, start=None, iterations: int = ITERATIONS):
    """Minimises mean cross-entropy + penalty / 2 |kernel|^2 with L-BFGS; x: [N, F]. Returns {"kernel", "bias"}."""
    if start is None:
        start = {"kernel": jnp.zeros((x.shape[1], num_classes)), "bias": jnp.zeros(num_classes)}
    return _lbfgs(start, jnp.asarray(x, jnp.float32), jnp.asarray(labels, jnp.int32), penalty, iterations)


@functools.partial(jax.jit, static_argnames="iterations")
def _lbfgs(weights, x, labels, penalty, iterations):
    def objective(w):
        loss = optax.softmax_cross_entropy_with_integer_labels(x @ w["kernel"] + w["bias"], labels)
        return jnp.mean(loss) + penalty / 2 * jnp.sum(jnp.square(w["kernel"]))

    solver = optax.lbfgs(memory_size=10)
    value_and_grad = optax.value_and_grad_from_state(objective)

    def iterate(carry, _):
        weights, state = carry
        value, grad = value_and_grad(weights, state=state)
        updates, state = solver.update(grad, state, weights, value=value, grad=grad, value_fn=objective)
        return (optax.apply_updates(weights, updates), state), None

    (weights, _), _ = jax.lax.scan(iterate, (weights, solver.init(weights)), length=iterations)
    return weights


def probe_logits(weights, x) -> np.ndarray:
    return np.asarray(x, np.float32) @ np.asarray(weights["kernel"]) + np.asarray(weights["bias"])


def top1(weights, x, labels) -> float:
    """Percent of rows whose largest logit is the label."""
    return 100 * float(np.mean(np.argmax(probe_logits(weights, x), axis=1) == labels))


def top_k(logits: np.ndarray, labels: np.ndarray, k: int) -> float:
    """Percent of rows whose label is among the k largest logits."""
    own = logits[np.arange(len(labels)), labels]
    return 100 * float(np.mean(np.sum(logits > own[:, None], axis=1) < k))


def confusion_matrix(labels: np.ndarray, predicted: np.ndarray, num_classes: int) -> np.ndarray:
    """Counts [true, predicted]."""
    flat = np.bincount(labels * num_classes + predicted, minlength=num_classes**2)
    return flat.reshape(num_classes, num_classes)
