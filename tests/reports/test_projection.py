"""Projections for figures: PCA of a known ellipse, t-SNE of clusters, colours of patches."""

import sys

import numpy as np
import pytest

from jepa_jax.reports.projection import patch_colours, pca, tsne

RNG = np.random.default_rng(0)


def test_pca_finds_the_axes_of_an_ellipse():
    x = RNG.normal(size=(3000, 3)) * (3, 1, 0.01)
    points, shares = pca(x)
    assert shares == pytest.approx([0.9, 0.1], abs=0.01)
    assert abs(np.corrcoef(points[:, 0], x[:, 0])[0, 1]) > 0.999


def test_tsne_keeps_clusters_together():
    labels = np.repeat(np.arange(4), 30)
    x = 8 * RNG.normal(size=(4, 20))[labels] + RNG.normal(size=(120, 20))
    y = tsne(x)
    distance = np.linalg.norm(y[:, None] - y[None], axis=-1)
    np.fill_diagonal(distance, np.inf)
    assert np.mean(labels[np.argmin(distance, axis=1)] == labels) == 1
    assert np.isfinite(y).all()


def test_patches_of_equal_features_have_equal_colours():
    maps = np.zeros((2, 4, 4, 8))
    maps[:, :2] = 1.0
    colours = patch_colours(maps)
    assert colours.shape == (2, 4, 4, 3) and colours.dtype == np.uint8
    assert (colours[:, :2] == colours[0, 0, 0]).all() and (colours[:, 2:] == colours[0, 3, 0]).all()
    assert not (colours[0, 0, 0] == colours[0, 3, 0]).all()


def test_without_scikit_learn_there_is_no_tsne(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.manifold", None)
    assert tsne(RNG.normal(size=(12, 3))) is None
