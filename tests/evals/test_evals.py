"""Probe and k-NN against scikit-learn on the same features."""

import numpy as np
import pytest
import scipy.special
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from sklearn.preprocessing import StandardScaler

from jepa_jax.base.errors import UserError
from jepa_jax.evals import linear_probe as linear_probe_module
from jepa_jax.evals.features import Split, held_out_split
from jepa_jax.evals.knn import knn_accuracy, knn_sweep, vote, vote_accuracies
from jepa_jax.evals.linear_probe import (
    PENALTIES,
    Standard,
    choose_penalty,
    confusion_matrix,
    fit_softmax,
    gram_matrix,
    linear_probe,
    top1,
    top_k,
)


def clusters(count, spread, seed):
    rng = np.random.default_rng(seed)
    centres = np.random.default_rng(7).normal(size=(5, 16))
    labels = rng.integers(0, 5, count)
    features = centres[labels] + spread * rng.normal(size=(count, 16))
    return Split((features * np.linspace(0.01, 30, 16)).astype(np.float32), labels.astype(np.int32))


TRAIN, TEST = clusters(1500, 1.5, 0), clusters(1000, 1.5, 1)


def test_probe_is_within_a_point_of_logistic_regression():
    ours = linear_probe(TRAIN, TEST, 5)
    scaler = StandardScaler().fit(TRAIN.features)
    theirs = LogisticRegression(C=1 / (ours["penalty"] * len(TRAIN.labels)), max_iter=2000)
    theirs.fit(scaler.transform(TRAIN.features), TRAIN.labels)
    score = 100 * theirs.score(scaler.transform(TEST.features), TEST.labels)
    assert ours["accuracy"] == pytest.approx(score, abs=1)
    assert 60 < ours["accuracy"] < 99  # neither chance nor trivial


@pytest.fixture(scope="module", params=[1.0, 1e-3], ids=["well conditioned", "badly conditioned"])
def hard_problem(request):
    """Standardised features [600, 24], labels of four classes that overlap, and their Gram matrix."""
    rng = np.random.default_rng(0)
    scales = np.geomspace(1, request.param, 24)
    features = rng.normal(size=(600, 24)) * scales @ np.linalg.qr(rng.normal(size=(24, 24)))[0]
    features = Standard.of(features)(features).astype(np.float32)
    labels = np.argmax(features @ rng.normal(size=(24, 4)) + 2 * rng.normal(size=(600, 4)), axis=1)
    return features, labels, gram_matrix(features)


def test_the_probe_equals_scikit_learn_at_weak_and_strong_penalties(hard_problem):
    x, labels, gram = hard_problem
    weights = None
    for penalty in (1e-2, 1e-5):  # the second starts from the first, as in a probe
        weights = fit_softmax(x, labels, 4, penalty, gram, weights)
        their = LogisticRegression(C=1 / (penalty * len(x)), tol=1e-8, solver="newton-cholesky")
        their.fit(x.astype(np.float64), labels)

        def objective(kernel, bias, penalty=penalty):
            log_p = scipy.special.log_softmax(x.astype(np.float64) @ kernel + bias, axis=1)
            return -np.mean(log_p[np.arange(len(x)), labels]) + penalty / 2 * np.sum(kernel**2)

        best = objective(their.coef_.T, their.intercept_)
        assert objective(weights["kernel"], weights["bias"]) == pytest.approx(best, rel=1e-5)
        assert top1(weights, x, labels) == pytest.approx(100 * their.score(x, labels), abs=0.2)


def test_a_fit_that_is_cut_short_says_so(hard_problem, monkeypatch):
    x, labels, gram = hard_problem
    monkeypatch.setattr(linear_probe_module, "MOST_ITERATIONS", 3)
    with pytest.warns(UserWarning, match="linear probe: not solved after 3 iterations at penalty 1e-05"):
        fit_softmax(x, labels, 4, 1e-5, gram)


def test_one_label_and_equal_features_are_no_obstacle(recwarn):
    x = np.zeros((50, 8), np.float32)
    for labels in (np.zeros(50, int), np.arange(50) % 5):
        weights = fit_softmax(x, labels, 5, 1e-5, gram_matrix(x))
        assert not weights["kernel"].any() and np.isfinite(weights["bias"]).all()
    assert not [one for one in recwarn.list if issubclass(one.category, RuntimeWarning)]


def test_features_that_are_not_finite_are_refused():
    features = np.where(np.arange(16) == 3, np.inf, TRAIN.features)
    with np.errstate(all="ignore"), pytest.raises(UserError, match="features are not finite"):
        linear_probe(Split(features, TRAIN.labels), TEST, 5)


def test_a_dead_dimension_changes_nothing():
    dead = [Split(np.concatenate([s.features, np.full((len(s.features), 1), 3.0)], 1).astype(np.float32), s.labels)
            for s in (TRAIN, TEST)]  # fmt: skip
    assert linear_probe(*dead, 5)["accuracy"] == pytest.approx(linear_probe(TRAIN, TEST, 5)["accuracy"], abs=0.3)


@pytest.mark.parametrize("k, temperature", [(1, 0.07), (20, 0.07), (20, 1.0)])
def test_knn_equals_scikit_learn(k, temperature):
    def unit(x):
        return x / np.linalg.norm(x, axis=1, keepdims=True)

    theirs = KNeighborsClassifier(k, metric="cosine", weights=lambda d: np.exp((1 - d) / temperature))
    expected = theirs.fit(unit(TRAIN.features), TRAIN.labels).score(unit(TEST.features), TEST.labels)
    assert knn_accuracy(TRAIN, TEST, 5, k=k, temperature=temperature) == pytest.approx(100 * expected, abs=0.11)


def test_neighbours_are_selected_without_sorting_all_keys():
    arrays = (np.zeros(shape, dtype) for shape, dtype in (((8, 4), "f"), ((900, 4), "f"), (900, "i"), (2, "f")))
    program = vote.lower(*arrays, num_classes=3, ks=(1, 20)).compile().as_text()
    assert "TopK" in program and " sort(" not in program


def test_every_k_and_temperature_of_a_sweep_equals_its_own_vote():
    ks, temperatures = (1, 7, 30), (0.05, 1.0)
    grid = vote_accuracies(TRAIN, TEST, 5, ks, temperatures)
    for row, temperature in enumerate(temperatures):
        for column, k in enumerate(ks):
            assert grid[row, column] == pytest.approx(knn_accuracy(TRAIN, TEST, 5, k=k, temperature=temperature))


def test_a_sweep_chooses_on_training_images_alone():
    shuffled = Split(TEST.features, np.random.default_rng(3).permutation(TEST.labels))
    own, other = knn_sweep(TRAIN, TEST, 5), knn_sweep(TRAIN, shuffled, 5)
    assert own["sweep"] == other["sweep"] and (own["k"], own["temperature"]) == (other["k"], other["temperature"])
    held_out = np.array(own["sweep"]["held_out_accuracy"])
    assert held_out.max() == own["held_out_accuracy"] == other["held_out_accuracy"] and held_out.shape == (6, 7)
    assert own["accuracy"] > other["accuracy"]


def test_held_out_images_are_apart():
    fit, score = held_out_split(105)
    assert len(score) == 10 and sorted([*fit, *score]) == list(range(105))


def test_the_penalty_is_sought_beyond_the_grid_while_its_edge_is_best():
    """Few noisy examples of many dimensions want a strong penalty; the weak ones overfit."""
    rng = np.random.default_rng(1)
    labels = np.tile([0, 1], 300)
    x = (rng.normal(size=(600, 300)) + 0.1 * labels[:, None]).astype(np.float32)
    x = Standard.of(x)(x)
    penalty, accuracy, _ = choose_penalty(x, labels, 2, gram_matrix(x))
    fit_part, score_part = held_out_split(len(x))
    strongest = fit_softmax(x[fit_part], labels[fit_part], 2, PENALTIES[-1], gram_matrix(x))
    assert penalty > PENALTIES[-1] and accuracy > top1(strongest, x[score_part], labels[score_part])


def test_probe_reports_top5_and_confusion():
    result = linear_probe(TRAIN, TEST, 5)
    assert result["top5_accuracy"] == 100  # of five classes
    assert np.trace(result["confusion"]) / len(TEST.labels) == pytest.approx(result["accuracy"] / 100)
    np.testing.assert_array_equal(np.sum(result["confusion"], axis=1), np.bincount(TEST.labels, minlength=5))


def test_top_k_and_confusion_by_hand():
    logits = np.array([[3.0, 2, 1], [1, 2, 3], [3, 1, 2]])
    labels = np.array([1, 0, 0])
    assert [top_k(logits, labels, k) for k in (1, 2, 3)] == pytest.approx([100 / 3, 200 / 3, 100])
    assert confusion_matrix(labels, logits.argmax(1), 3).tolist() == [[1, 0, 1], [1, 0, 0], [0, 0, 0]]
