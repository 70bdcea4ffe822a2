"""The collapse watch: figures with known values, injected collapses that are named, healthy features that are not."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jepa_jax.base.errors import Collapsed
from jepa_jax.evals.feature_quality import collapse_warning, effective_rank, feature_spread, singular_values
from jepa_jax.program.workdir import Workdir
from jepa_jax.training.run import train
from tests.runs import Silent
from tests.tiny import tiny_masked_config

RNG = np.random.default_rng(0)
HEALTHY = RNG.normal(size=(512, 32)) + 2.0


def test_figures_of_independent_unit_gaussians():
    figures = feature_spread(RNG.normal(size=(4096, 16)))
    assert figures["std_mean"] == pytest.approx(1, abs=0.03)
    assert figures["relative_spread"] == pytest.approx(1, abs=0.01)
    assert figures["effective_rank"] == pytest.approx(16, abs=0.1)
    assert figures["mean_abs_correlation"] == pytest.approx(np.sqrt(2 / np.pi / 4096), rel=0.3)
    assert figures["dimensions"] == 16


def test_relative_spread_counts_the_common_mean():
    x = RNG.normal(size=(4096, 8))
    # Variance 8 around a mean of squared length 9 * 8: the spread is sqrt(8 / 80).
    assert feature_spread(x + 3)["relative_spread"] == pytest.approx(np.sqrt(0.1), rel=0.03)


@pytest.mark.parametrize("shape", [(64, 16), (16, 64), (5, 1)])
def test_singular_values_equal_those_of_an_svd(shape):
    x = RNG.normal(size=shape)
    expected = np.linalg.svd(x, compute_uv=False)
    np.testing.assert_allclose(singular_values(x)[: len(expected)], expected, rtol=1e-6)


@given(st.integers(1, 40))
@settings(max_examples=10)
def test_effective_rank_of_equal_singular_values_is_their_number(count):
    assert effective_rank(np.r_[np.full(count, 3.0), np.zeros(5)]) == pytest.approx(count)


@given(st.floats(1e-3, 1e3))
@settings(max_examples=10)
def test_scale_changes_no_verdict(scale):
    figures, scaled = feature_spread(HEALTHY), feature_spread(HEALTHY * scale)
    for name in ("relative_spread", "effective_rank", "mean_abs_correlation"):
        assert scaled[name] == pytest.approx(figures[name], rel=1e-5)


def rank_one_and_noise():
    return RNG.normal(size=(512, 1)) * RNG.normal(size=(1, 32)) + 1e-3 * RNG.normal(size=(512, 32))


def repeated_dimensions():
    # Four factors, each of them in eight nearly equal dimensions, and all of them close to one common factor.
    common, own = RNG.normal(size=(512, 1)), 0.2 * RNG.normal(size=(512, 4))
    return np.repeat(common + own, 8, axis=1) + 0.02 * RNG.normal(size=(512, 32))


@pytest.mark.parametrize(
    "features, words",
    [
        (np.full((256, 16), 3.0), "nearly constant"),
        (np.zeros((256, 16)), "nearly constant"),
        (5 + 1e-3 * RNG.normal(size=(256, 16)), "nearly constant"),
        (rank_one_and_noise(), "handful of directions"),
        (repeated_dimensions(), "repeat each other"),
        (np.full((8, 4), np.nan), "not finite"),
    ],
)
def test_an_injected_collapse_is_named(features, words):
    warning = collapse_warning(feature_spread(features.astype(np.float32)))
    assert warning is not None and words in warning


def test_healthy_features_are_not_flagged():
    assert collapse_warning(feature_spread(HEALTHY)) is None
    # A large common mean, as of tokens that share a position embedding, is no collapse.
    assert collapse_warning(feature_spread(HEALTHY + 20)) is None
    # ReLU features with dead dimensions.
    relu = np.maximum(RNG.normal(size=(512, 32)), 0)
    relu[:, :8] = 0
    assert collapse_warning(feature_spread(relu)) is None


def test_a_fall_against_the_start_is_seen_before_the_absolute_limit():
    initial = feature_spread(RNG.normal(size=(512, 64)))
    falling = feature_spread(RNG.normal(size=(512, 64)) + 30)
    assert collapse_warning(falling) is None
    assert "before training" in str(collapse_warning(falling, initial))
    assert collapse_warning(initial, initial) is None


def three_epochs(**overrides):
    settings = dict(
        data__num_train=512, data__num_test=128, optim__lr=3e-3, optim__epochs=3.0, train__checkpoint_every_steps=0,
        mesh__data=1, eval__every_epochs=0, eval__knn_every_epochs=0,
    )  # fmt: skip
    return tiny_masked_config("hjepa", **(settings | overrides))


@pytest.mark.slow
def test_a_run_that_collapses_is_stopped_within_three_epochs(tmp_path):
    # Nothing slow, nothing detached, nothing that spreads features: a constant predicts itself.
    config = three_epochs(
        method__target="shared", method__regulariser="none", eval__weights="online", train__stop_on_collapse=True
    )
    with pytest.raises(Collapsed, match="nearly constant"):
        train(config, tmp_path, console=Silent())
    summary = Workdir(tmp_path).read_summary()
    assert summary["status"] == "collapsed" and summary["epochs"] <= 3


@pytest.mark.slow
def test_the_same_run_with_its_safeguards_is_not_flagged(tmp_path):
    assert train(three_epochs(), tmp_path, console=Silent())["collapse_warning"] is None
