"""k-nearest-neighbour classification on frozen features: cosine similarity, votes weighted by exp(similarity / T)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jepa_jax.evals.features import Split

QUERIES = 500  # test images compared at once: bounds the [queries, train] similarity matrix


def knn_accuracy(train: Split, test: Split, num_classes: int, *, k: int, temperature: float) -> float:
    """Percent of test images whose neighbours' weighted vote is right."""
    k = min(k, len(train.labels))
    keys = jnp.asarray(unit_length(train.features))
    labels = jnp.asarray(train.labels)
    queries = unit_length(test.features)
    padding = -len(queries) % QUERIES  # one shape, one compilation
    blocks = np.pad(queries, ((0, padding), (0, 0))).reshape(-1, QUERIES, queries.shape[1])
    votes = [_vote(jnp.asarray(block), keys, labels, num_classes, k, temperature) for block in blocks]
    predicted = np.concatenate([np.asarray(v) for v in votes])[: len(queries)]
    return 100 * float(np.mean(predicted == test.labels))


def unit_length(features: np.ndarray) -> np.ndarray:
    return features / np.maximum(np.linalg.norm(features, axis=1, keepdims=True), 1e-12)


@functools.partial(jax.jit, static_argnames=("num_classes", "k"))
def _vote(queries, keys, labels, num_classes, k, temperature):
    similarity, neighbours = jax.lax.top_k(queries @ keys.T, k)  # [Q, k]
    # Relative to the nearest neighbour: the same winner, and no overflow at small temperatures.
    weights = jnp.exp((similarity - similarity[:, :1]) / temperature)
    return jnp.argmax(jnp.sum(weights[..., None] * jax.nn.one_hot(labels[neighbours], num_classes), axis=1), axis=1)
