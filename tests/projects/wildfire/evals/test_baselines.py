"""Baselines: what they score, what they are fitted on, and what they can know of newly burning pixels."""

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression

from jepa_jax.data.sources import open_data
from jepa_jax.projects.wildfire.evals.baselines import (
    distance,
    fit_logistic,
    host_batches,
    pixel_features,
    read_reference,
)
from jepa_jax.projects.wildfire.evals.truth import ranking_figures
from tests.projects.wildfire.evals.pixel_method import fire_config


@pytest.fixture(scope="module")
def data():
    return open_data(fire_config().data)


@pytest.fixture(scope="module")
def reference(data):
    return read_reference(data.test, {"logistic": fit_logistic(data.train)})


def test_the_truth_is_in_the_order_of_the_source(data, reference):
    batch, truth = data.test.batch(np.arange(24)), reference.truth
    np.testing.assert_array_equal(truth.target, batch["target"][..., 0])
    np.testing.assert_array_equal(truth.new, ~batch["fire"][:, -1, ..., 0])
    np.testing.assert_array_equal(truth.fire, batch["fire_id"])
    np.testing.assert_array_equal(reference.scores("persistence"), batch["fire"][:, -1, ..., 0])


def test_persistence_knows_nothing_of_newly_burning_pixels(reference):
    truth = reference.truth
    figures = ranking_figures(reference.scores("persistence"), truth)
    base_rate = truth.target[truth.new].mean()
    assert figures["new_average_precision"] == pytest.approx(base_rate)
    assert figures["average_precision"] > 2 * truth.target.mean()


def test_a_threshold_of_the_dilation_is_the_mask_dilated_by_a_disc():
    burning = np.zeros((2, 7, 9), bool)
    burning[0, 3, 4] = True
    rows, columns = np.indices((7, 9))
    np.testing.assert_array_equal(distance(burning)[0] <= 2.5, (rows - 3) ** 2 + (columns - 4) ** 2 <= 6.25)
    assert distance(burning)[0].max() < distance(burning)[1].min()  # nothing burns in the second


def test_features_of_a_pixel_by_hand():
    fire = np.zeros((1, 2, 8, 8, 1), bool)
    fire[0, 1, 2:4, 2:4] = True
    static = np.random.default_rng(0).random((1, 8, 8, 3), np.float32)
    batch = {"fire": fire, "static": static, "wind": np.array([[[0, 0], [0.5, 0.25]]], np.float32)}
    features = pixel_features(batch)
    falls = (4 / 9 - 2 / 9) / 2 * 0.5  # wind from the east meets 4/9 one pixel before and 2/9 one pixel after
    np.testing.assert_allclose(features[0, 2, 2], [1, 4 / 9, 4 / 49, 0, 0.5, 1, 0, falls, *static[0, 2, 2]], atol=1e-6)
    np.testing.assert_allclose(features[0, 7, 7, :4], [0, 0, 0, -np.hypot(4, 4)], atol=1e-6)
    nothing = pixel_features({**batch, "fire": np.zeros_like(fire)})
    assert (nothing[..., 3] == -8).all() and (nothing[..., 7] == 0).all()


@pytest.mark.parametrize(("comes_from", "downwind"), [(0.0, (6, 4)), (0.25, (4, 2)), (0.5, (2, 4)), (0.75, (4, 6))])
def test_pixels_downwind_of_a_fire_differ_from_those_upwind(comes_from, downwind):
    """Wind from the north (0) blows towards higher rows, wind from the east (1/4) towards lower columns."""
    fire = np.zeros((1, 1, 9, 9, 1), bool)
    fire[0, 0, 4, 4] = True
    batch = {"fire": fire, "static": np.zeros((1, 9, 9, 0)), "wind": np.array([[[0.5, comes_from]]], np.float32)}
    feature = pixel_features(batch)[0, ..., 7]
    upwind = (8 - downwind[0], 8 - downwind[1])
    # The 3 x 3 share is 1/9 next to the burning pixel and 0 beyond: half of that per pixel, times the speed.
    assert feature[downwind] == pytest.approx(1 / 36) and feature[upwind] == pytest.approx(-1 / 36)
    assert feature[downwind[::-1]] == pytest.approx(0, abs=1e-6)  # across the wind


def test_wind_and_distance_help_on_newly_burning_pixels():
    data = open_data(fire_config(data__num_train=512, data__num_test=512, data__validation=0.0).data)
    reference = read_reference(data.test, {"logistic": fit_logistic(data.train)})
    kept = np.delete(np.arange(11), [3, 7])  # without distance and the front's side of the wind
    x, y = (np.concatenate(parts) for parts in zip(*(
        (pixel_features(batch)[..., kept].reshape(-1, 9), batch["target"].ravel())
        for _, batch in host_batches(data.train)
    ), strict=True))  # fmt: skip
    other = LogisticRegression(C=1.0, max_iter=300).fit((x - x.mean(0)) / x.std(0), y)
    scores = np.empty(reference.truth.target.shape)
    for indices, batch in host_batches(data.test):
        found = (pixel_features(batch)[..., kept].reshape(-1, 9) - x.mean(0)) / x.std(0)
        scores[indices] = other.decision_function(found).reshape(-1, 16, 16)
    ours, without = (
        ranking_figures(values, reference.truth)["new_average_precision"]
        for values in (reference.scores("logistic"), scores)
    )
    assert ours > without + 0.03, (ours, without)


def test_the_logistic_regression_is_that_of_scikit_learn(data):
    logistic, batch = fit_logistic(data.train), data.train.batch(np.arange(len(data.train)))
    x, y = pixel_features(batch).reshape(-1, 11), batch["target"].ravel()  # fewer than the limit: all pixels
    standard = (x - x.mean(0)) / x.std(0)
    # Two symmetric columns with penalty / 2 each: one column with a quarter of the penalty on its difference.
    other = LogisticRegression(C=1 / (len(y) * 1e-5 / 2), tol=1e-8, max_iter=1000).fit(standard, y)
    own = logistic.kernel[:, 1] - logistic.kernel[:, 0]

    def objective(weights, bias):
        margins = (standard @ weights + bias) * np.where(y, 1, -1)
        return np.mean(np.logaddexp(0, -margins, dtype=np.float64)) + 1e-5 / 4 * np.sum(weights**2)

    least = objective(other.coef_[0], other.intercept_)
    assert least * 0.999 < objective(own, logistic.bias[1] - logistic.bias[0]) < least * 1.005
    # What burns stays in the mask: only the penalty limits the weights of mask and distance, and hardly at that.
    limited = np.delete(np.arange(11), [0, 3])
    np.testing.assert_allclose(own[limited], other.coef_[0, limited], rtol=0.02, atol=0.03)


def test_neighbourhoods_tell_more_of_new_pixels_than_the_base_rate(reference):
    base_rate = reference.truth.target[reference.truth.new].mean()
    for name in ("dilation", "logistic"):
        assert ranking_figures(reference.scores(name), reference.truth)["new_average_precision"] > 2 * base_rate


def test_the_fit_is_repeatable_and_depends_on_its_data(data):
    first, second = fit_logistic(data.train), fit_logistic(data.train)
    np.testing.assert_array_equal(first.kernel, second.kernel)
    assert np.abs(first.kernel - fit_logistic(data.test).kernel).max() > 1e-3
