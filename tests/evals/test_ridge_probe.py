"""Ridge regression against its closed form, and what the probe reports."""

import numpy as np
import pytest

from jepa_jax.base.errors import UserError
from jepa_jax.evals.features import Split
from jepa_jax.evals.ridge_probe import mean_r2, r2_by_coordinate, ridge_predictions, ridge_probe

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("count, features", [(40, 5), (12, 30)])
def test_predictions_solve_the_normal_equations(count, features):
    x, y, new = RNG.normal(size=(count, features)), RNG.normal(size=(count, 2)), RNG.normal(size=(4, features))
    centred = x - x.mean(axis=0)
    for penalty, predicted in zip((0.01, 1.0), ridge_predictions(x, y, new, (0.01, 1.0)), strict=True):
        gram = centred.T @ centred / count + penalty * np.eye(features)
        weights = np.linalg.solve(gram, centred.T @ (y - y.mean(axis=0)) / count)
        np.testing.assert_allclose(predicted, y.mean(axis=0) + (new - x.mean(axis=0)) @ weights, rtol=1e-9, atol=1e-9)


def test_r2_is_1_for_the_truth_and_0_for_its_mean():
    truth = np.stack([RNG.normal(size=50), np.full(50, 3.0)], axis=1)
    assert r2_by_coordinate(truth, truth) == [1.0, None]
    np.testing.assert_allclose(mean_r2(np.broadcast_to(truth.mean(axis=0), truth.shape), truth), 0, atol=1e-12)
    assert mean_r2(truth[:, 1:], truth[:, 1:]) is None


def split(count):
    features = RNG.normal(size=(count, 10)).astype(np.float32)
    noise = RNG.normal(size=count)
    targets = np.stack([3 * features[:, 0] - features[:, 1] + 5, noise], axis=1).astype(np.float32)
    return Split(100 * features, np.zeros(0, np.int32), targets)


def test_a_linear_target_is_found_and_noise_is_not():
    found = ridge_probe(split(400), split(200))
    known, noise = found["r2_by_coordinate"]
    assert known > 0.999 and abs(noise) < 0.2 and found["r2"] == pytest.approx((known + noise) / 2)
    assert found["mean_rmse"][0] == pytest.approx(10**0.5, rel=0.2) and found["rmse"][0] < 0.02 * found["mean_rmse"][0]


def test_features_of_a_diverged_encoder_are_refused():
    train = split(20)
    with pytest.raises(UserError, match="ridge probe: features are not finite"):
        ridge_probe(train._replace(features=train.features * np.nan), train)
