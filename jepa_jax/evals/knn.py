"""k-nearest-neighbour classification on frozen features: cosine similarity, votes weighted by exp(similarity / T)."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jepa_jax.base.statistics import accuracy_interval
from jepa_jax.evals.evaluators import EncoderEvaluator, Figures
from jepa_jax.evals.features import OnCount, Split, accuracy_figures, held_out_split, ignore
from jepa_jax.evals.inference import FrozenEncoder

QUERIES = 500  # test images compared at once: bounds the [queries, train] similarity matrix
KS = (1, 5, 10, 20, 50, 100, 200)
TEMPERATURES = (0.02, 0.04, 0.07, 0.1, 0.2, 0.5)
FIXED_K, FIXED_TEMPERATURE = 20, 0.07


class NearestNeighbours(EncoderEvaluator):
    """Accuracy of k-NN, with k and temperature chosen on held-out train images and with usual ones."""

    title = "k-NN"

    def measure(self, encoder: FrozenEncoder, level: int, start: OnCount) -> Figures:
        (train, test), classes = encoder.features(level), len(encoder.train.classes)
        start(len(train.labels) // 10 + len(test.labels))
        sweep = knn_sweep(train, test, classes, self.context.progress.advance)
        fixed = knn_accuracy(train, test, classes, k=FIXED_K, temperature=FIXED_TEMPERATURE)
        return accuracy_figures(sweep["accuracy"], train, test, classes) | {
            **sweep,
            "fixed_accuracy": fixed,
            "fixed_interval_95": accuracy_interval(fixed, len(test.labels)),
            "fixed_k": FIXED_K,
            "fixed_temperature": FIXED_TEMPERATURE,
        }


def knn_accuracy(
    train: Split, test: Split, num_classes: int, *, k: int, temperature: float, on_images: OnCount = ignore
) -> float:
    """Returns the percentage of test images whose neighbours' weighted vote is right."""
    return float(vote_accuracies(train, test, num_classes, (k,), (temperature,), on_images)[0, 0])


def knn_sweep(train: Split, test: Split, num_classes: int, on_images: OnCount = ignore) -> Figures:
    """Chooses k and T on a held-out tenth of `train`, then votes once on `test` with all of `train`."""
    fit_part, score_part = held_out_split(len(train.labels))
    kept, held_out = train.part(fit_part), train.part(score_part)
    ks = tuple(k for k in KS if k <= len(kept.labels)) or (len(kept.labels),)
    grid = vote_accuracies(kept, held_out, num_classes, ks, TEMPERATURES, on_images)
    row, column = divmod(int(np.argmax(grid)), len(ks))
    k, temperature = ks[column], TEMPERATURES[row]
    return {
        "accuracy": knn_accuracy(train, test, num_classes, k=k, temperature=temperature, on_images=on_images),
        "k": k,
        "temperature": temperature,
        "held_out_accuracy": float(grid[row, column]),
        "sweep": {"ks": ks, "temperatures": TEMPERATURES, "held_out_accuracy": grid.tolist()},
    }


def vote_accuracies(
    train: Split,
    test: Split,
    num_classes: int,
    ks: Sequence[int],
    temperatures: Sequence[float],
    on_images: OnCount = ignore,
) -> np.ndarray:
    """Returns the percentage right for each temperature and each k (ascending), as [temperatures, ks]."""
    ks = tuple(min(k, len(train.labels)) for k in ks)
    keys, labels = jnp.asarray(unit_length(train.features)), jnp.asarray(train.labels)
    queries = unit_length(test.features)
    count, size = len(queries), min(QUERIES, len(queries))
    padded = np.pad(queries, ((0, -count % size), (0, 0)))  # one shape, one compilation
    predicted = []
    for start in range(0, count, size):
        block = jnp.asarray(padded[start : start + size])
        votes = vote(block, keys, labels, jnp.asarray(temperatures, jnp.float32), num_classes, ks)
        predicted.append(np.asarray(votes))
        on_images(min(size, count - start))
    right = np.concatenate(predicted, axis=-1)[..., :count] == test.labels
    return 100 * np.mean(right, axis=-1)


def unit_length(features: np.ndarray) -> np.ndarray:
    return features / np.maximum(np.linalg.norm(features, axis=1, keepdims=True), 1e-12)


@functools.partial(jax.jit, static_argnames=("num_classes", "ks"))
def vote(
    queries: jax.Array,
    keys: jax.Array,
    labels: jax.Array,
    temperatures: jax.Array,
    num_classes: int,
    ks: tuple[int, ...],
) -> jax.Array:
    """Returns predicted classes [temperatures, ks, Q]."""
    # Without the barrier XLA pulls slices of the neighbours into their selection, and sorts all keys instead.
    similarity, neighbours = jax.lax.optimization_barrier(jax.lax.top_k(queries @ keys.T, ks[-1]))  # [Q, k]
    classes = labels[neighbours]
    rows = jnp.arange(len(queries))[:, None]

    def with_temperature(temperature: jax.Array) -> jax.Array:
        # Relative to the nearest neighbour: the same winner, and no overflow at small temperatures.
        weights = jnp.exp((similarity - similarity[:, :1]) / temperature)
        votes, winners, start = jnp.zeros((len(queries), num_classes)), [], 0
        for k in ks:  # the neighbours up to k add to the votes of those before them
            votes = votes.at[rows, classes[:, start:k]].add(weights[:, start:k])
            winners.append(jnp.argmax(votes, axis=1))
            start = k
        return jnp.stack(winners)

    return jax.lax.map(with_temperature, temperatures)
