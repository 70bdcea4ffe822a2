"""Probe and k-NN against scikit-learn on the same features."""

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from sklearn.preprocessing import StandardScaler

from jepa_jax.evals.features import Split, held_out_split
from jepa_jax.evals.knn import knn_accuracy, knn_sweep, vote_accuracies
from jepa_jax.evals.linear_probe import confusion_matrix, fit_softmax, linear_probe, top_k


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


def test_every_k_and_temperature_of_a_sweep_equals_its_own_vote():
    ks, temperatures = (1, 7, 30), (0.05, 1.0)
    grid = vote_accuracies(TRAIN, TEST, 5, ks, temperatures)
    for row, temperature in enumerate(temperatures):
        for column, k in enumerate(ks):
            assert grid[row, column] == pytest.approx(knn_accuracy(TRAIN, TEST, 5, k=k, temperature=temperature))


def test_a_sweep_chooses_on_training_images_alone():
    shuffled = Split(TEST.features, np.random.default_rng(3).permutation(TEST.labels))
    own, other = knn_sweep(TRAIN, TEST, 5), knn_sweep(TRAIN, shuffled, 5)
    assert (own.k, own.temperature, own.held_out_accuracy) == (other.k, other.temperature, other.held_out_accuracy)
    assert own.held_out.max() == own.held_out_accuracy and own.held_out.shape == (6, 7)
    assert own.accuracy > other.accuracy


def test_held_out_images_are_apart():
    fit, score = held_out_split(105)
    assert len(score) == 10 and sorted([*fit, *score]) == list(range(105))


def test_probe_reports_top5_and_confusion():
    result = linear_probe(TRAIN, TEST, 5)
    assert result.top5_accuracy == 100  # of five classes
    assert np.trace(result.confusion) / len(TEST.labels) == pytest.approx(result.accuracy / 100)
    np.testing.assert_array_equal(result.confusion.sum(axis=1), np.bincount(TEST.labels, minlength=5))


def test_top_k_and_confusion_by_hand():
    logits = np.array([[3.0, 2, 1], [1, 2, 3], [3, 1, 2]])
    labels = np.array([1, 0, 0])
    assert [top_k(logits, labels, k) for k in (1, 2, 3)] == pytest.approx([100 / 3, 200 / 3, 100])
    assert confusion_matrix(labels, logits.argmax(1), 3).tolist() == [[1, 0, 1], [1, 0, 0], [0, 0, 0]]
