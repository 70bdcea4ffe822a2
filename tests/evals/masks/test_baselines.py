"""Baselines: what they score, what they are fitted on, and what they can know of newly burning pixels."""

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression

from jepa_jax.data.sources import open_data
from jepa_jax.evals.masks.baselines import distance, fit_logistic, pixel_features, read_reference
from jepa_jax.evals.masks.truth import ranking_figures
from tests.evals.masks.pixel_method import fire_config


@pytest.fixture(scope="module")
def data():
    return open_data(fire_config().data)


@pytest.fixture(scope="module")
def reference(data):
    return read_reference(data.test, fit_logistic(data.train))


def test_the_truth_is_in_the_order_of_the_source(data, reference):
    batch, truth = data.test.batch(np.arange(24)), reference.truth
    np.testing.assert_array_equal(truth.target, batch["target"][..., 0])
    np.testing.assert_array_equal(truth.new, ~batch["fire"][:, -1, ..., 0])
    np.testing.assert_array_equal(truth.fire, batch["fire_id"])
    np.testing.assert_array_equal(reference.scores["persistence"], batch["fire"][:, -1, ..., 0])


def test_persistence_knows_nothing_of_newly_burning_pixels(reference):
    truth = reference.truth
    figures = ranking_figures(reference.scores["persistence"], truth)
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
    np.testing.assert_allclose(features[0, 2, 2], [1, 4 / 9, 4 / 49, 0.5, 1, 0, *static[0, 2, 2]], atol=1e-6)
    np.testing.assert_allclose(features[0, 7, 7, :3], [0, 0, 0], atol=1e-6)


def test_the_logistic_regression_is_that_of_scikit_learn(data):
    logistic, batch = fit_logistic(data.train), data.train.batch(np.arange(len(data.train)))
    x, y = pixel_features(batch).reshape(-1, 9), batch["target"].ravel()  # fewer than the limit: all pixels
    standard = (x - x.mean(0)) / x.std(0)
    # Two symmetric columns with penalty / 2 each: one column with a quarter of the penalty on its difference.
    other = LogisticRegression(C=1 / (len(y) * 1e-5 / 2), tol=1e-8, max_iter=1000).fit(standard, y)
    # What burns stays in the mask: only the penalty limits the weight of the first feature, which no pixel else has.
    own = logistic.kernel[:, 1] - logistic.kernel[:, 0]
    np.testing.assert_allclose(own[1:], other.coef_[0, 1:], rtol=0.02, atol=0.02)
    unburned = x[:, 0] == 0
    np.testing.assert_allclose(
        logistic(batch).ravel()[unburned], other.decision_function(standard[unburned]), rtol=0.02, atol=0.1
    )


def test_neighbourhoods_tell_more_of_new_pixels_than_the_base_rate(reference):
    base_rate = reference.truth.target[reference.truth.new].mean()
    for name in ("dilation", "logistic"):
        assert ranking_figures(reference.scores[name], reference.truth)["new_average_precision"] > 2 * base_rate


def test_the_fit_is_repeatable_and_sees_training_data_alone(data):
    first, second = fit_logistic(data.train), fit_logistic(data.train)
    np.testing.assert_array_equal(first.kernel, second.kernel)
    assert np.abs(first.kernel - fit_logistic(data.test).kernel).max() > 1e-3
