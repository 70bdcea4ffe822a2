"""Linear probe: multinomial logistic regression on frozen, standardised features, solved to its optimum.

The problem is convex, so there is no rate, seed or epoch to choose. The one free number, the weight penalty, is chosen
on a part of the *training* set; the test set is looked at once.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jepa_jax.evals.features import Split

PENALTIES = (1e-5, 1e-4, 1e-3, 1e-2)
HELD_OUT = 0.1
ITERATIONS = 60


class ProbeResult(NamedTuple):
    """Accuracy in percent on the test split, and the penalty that the held-out part chose."""

    accuracy: float
    penalty: float
    held_out_accuracy: float


def linear_probe(train: Split, test: Split, num_classes: int) -> ProbeResult:
    """Fits on `train`, scores on `test`."""
    mean, std = train.features.mean(0), train.features.std(0)
    scale = 1 / np.maximum(std, 1e-6 * max(float(std.max()), 1e-12))  # a dead dimension must not become noise
    x_train, x_test = ((s.features - mean) * scale for s in (train, test))
    order = np.random.default_rng(0).permutation(len(x_train))
    held_out = max(1, round(HELD_OUT * len(order)))
    fit_part, score_part = order[held_out:], order[:held_out]

    scores = []
    weights = None
    for penalty in sorted(PENALTIES, reverse=True):  # the strongest first: each solution starts the next one
        weights = fit_softmax(x_train[fit_part], train.labels[fit_part], num_classes, penalty, weights)
        scores.append((top1(weights, x_train[score_part], train.labels[score_part]), penalty, weights))
    held_out_accuracy, penalty, weights = max(scores, key=lambda entry: entry[0])
    weights = fit_softmax(x_train, train.labels, num_classes, penalty, weights)
    return ProbeResult(top1(weights, x_test, test.labels), penalty, held_out_accuracy)


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


def top1(weights, x, labels) -> float:
    """Percent of rows whose largest logit is the label."""
    logits = np.asarray(x, np.float32) @ np.asarray(weights["kernel"]) + np.asarray(weights["bias"])
    return 100 * float(np.mean(np.argmax(logits, axis=1) == labels))
