"""Probe and k-NN against scikit-learn on the same features."""

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from sklearn.preprocessing import StandardScaler

from jepa_jax.evals.features import Split
from jepa_jax.evals.knn import knn_accuracy
from jepa_jax.evals.linear_probe import fit_softmax, linear_probe


def clusters(count, spread, seed):
    rng = np.random.default_rng(seed)
    centres = np.random.default_rng(7).normal(size=(5, 16))
    labels = rng.integers(0, 5, count)
    features = centres[labels] + spread * rng.normal(size=(count, 16))
    return Split((features * np.linspace(0.01, 30, 16)).astype(np.float32), labels.astype(np.int32))


TRAIN, TEST = clusters(1500, 1.5, 0), clusters(1000, 1.5, 1)


def test_probe_is_within_a_point_of_logistic_regression():
    ours = linear_probe(TRAIN, TEST, 5).accuracy
    scaler = StandardScaler().fit(TRAIN.features)
    theirs = LogisticRegression(max_iter=2000).fit(scaler.transform(TRAIN.features), TRAIN.labels)
    assert ours == pytest.approx(100 * theirs.score(scaler.transform(TEST.features), TEST.labels), abs=1)
    assert 60 < ours < 99  # neither chance nor trivial


def test_solver_reaches_the_optimum():
    x = ((TRAIN.features - TRAIN.features.mean(0)) / TRAIN.features.std(0)).astype(np.float32)
    weights = fit_softmax(x, TRAIN.labels, 5, 1e-2, iterations=60)
    logits = x @ np.asarray(weights["kernel"]) + np.asarray(weights["bias"])
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    gradient = x.T @ (p - np.eye(5)[TRAIN.labels]) / len(x) + 1e-2 * np.asarray(weights["kernel"])
    assert np.abs(gradient).max() < 1e-4


def test_a_dead_dimension_changes_nothing():
    dead = [Split(np.concatenate([s.features, np.full((len(s.features), 1), 3.0)], 1).astype(np.float32), s.labels)
            for s in (TRAIN, TEST)]  # fmt: skip
    assert linear_probe(*dead, 5).accuracy == pytest.approx(linear_probe(TRAIN, TEST, 5).accuracy, abs=0.3)


@pytest.mark.parametrize("k, temperature", [(1, 0.07), (20, 0.07), (20, 1.0)])
def test_knn_equals_scikit_learn(k, temperature):
    def unit(x):
        return x / np.linalg.norm(x, axis=1, keepdims=True)

    theirs = KNeighborsClassifier(k, metric="cosine", weights=lambda d: np.exp((1 - d) / temperature))
    expected = theirs.fit(unit(TRAIN.features), TRAIN.labels).score(unit(TEST.features), TEST.labels)
    assert knn_accuracy(TRAIN, TEST, 5, k=k, temperature=temperature) == pytest.approx(100 * expected, abs=0.11)
