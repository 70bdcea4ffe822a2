"""RankMe, alpha-ReQ and LiDAR on spectra whose answer is known."""

import numpy as np
import pytest

from jepa_jax.evals.feature_quality import alpha_req, components_for, feature_quality, lidar, rankme

RNG = np.random.default_rng(0)


def orthonormal(rows, columns):
    return np.linalg.qr(RNG.normal(size=(rows, columns)))[0]


def test_rankme_of_a_flat_spectrum_is_its_length():
    assert rankme(np.ones(50)) == pytest.approx(50, rel=1e-4)


def test_rankme_of_a_geometric_spectrum():
    p = 0.5 ** np.arange(1, 30)
    # Entropy of p_k = 2^-k is 2 log 2.
    assert rankme(p) == pytest.approx(4, rel=1e-3)


@pytest.mark.parametrize("alpha", [0.5, 1.0, 2.0])
def test_alpha_of_a_power_law_spectrum(alpha):
    assert alpha_req(np.arange(1, 200) ** -alpha) == pytest.approx(alpha, rel=1e-6)


def test_alpha_reads_the_eigenvalues_of_the_covariance():
    x = orthonormal(400, 64)
    x -= x.mean(axis=0)
    x = np.linalg.qr(x)[0] * np.arange(1, 65) ** -0.5  # singular values i^-1/2: eigenvalues i^-1
    assert feature_quality(x)["alpha_req"] == pytest.approx(1, abs=0.05)


def test_alpha_needs_a_spectrum():
    assert alpha_req(np.array([1.0, 0.0, 0.0])) is None


def test_components_for_a_part_of_the_variance():
    assert components_for(np.array([98.0, 1, 0.5, 0.5]), 0.99) == 2
    assert components_for(np.ones(100), 0.99) == 99
    assert components_for(np.zeros(3), 0.99) == 0


def test_quality_of_isotropic_features():
    figures = feature_quality(RNG.normal(size=(4096, 16)).astype(np.float32))
    assert figures["rank_ratio"] == pytest.approx(1, abs=0.01)
    assert figures["components_99"] == 16
    assert figures["variance_mean"] == pytest.approx(1, abs=0.05)
    assert figures["collapse"] is None


def test_quality_names_an_injected_collapse():
    figures = feature_quality(np.ones((64, 8), np.float32))
    assert "nearly constant" in figures["collapse"]
    assert figures["variance_max"] == 0 and figures["components_99"] == 0


def views(images, per_image, between, within):
    """Independent Gaussian image means and views around them; standard deviations of each dimension."""
    means = RNG.normal(size=(images, 1, len(between))) * between
    return means + RNG.normal(size=(images, per_image, len(within))) * within


def test_lidar_counts_the_directions_that_tell_images_apart():
    between = np.r_[np.ones(6), np.zeros(10)]
    x = views(2000, 10, 100 * between, np.ones(16))
    assert lidar(x) == pytest.approx(6, abs=0.1)


def test_lidar_weighs_directions_by_what_views_change():
    # Between / within variance is 1e4 in one direction and 1 in the other seven: nearly one direction counts.
    x = views(2000, 10, np.r_[100.0, np.ones(7)], np.ones(8))
    assert lidar(x) == pytest.approx(1, abs=0.05)
    # Scaled in the same way between and within, all eight count the same.
    x = views(4000, 10, 50 * np.r_[100.0, np.ones(7)], np.r_[100.0, np.ones(7)])
    assert lidar(x) == pytest.approx(8, abs=0.1)


def test_lidar_does_not_depend_on_scale_and_needs_views_that_differ():
    x = views(300, 5, np.ones(6), np.ones(6))
    assert lidar(1e-3 * x) == pytest.approx(lidar(x), rel=1e-9)
    assert lidar(np.repeat(RNG.normal(size=(20, 1, 4)), 3, axis=1)) is None
