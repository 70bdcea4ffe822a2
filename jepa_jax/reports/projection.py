"""Projections of features for figures: PCA, t-SNE, and patch features as colours."""

import numpy as np

PERPLEXITY = 30.0
TSNE_COMPONENTS = 50  # principal components keep the relevant distances and make them cheap


def pca(features: np.ndarray, components: int = 2) -> tuple[np.ndarray, np.ndarray]:
    """Returns coordinates [N, components] and the share of the variance that each component holds."""
    x = np.asarray(features, np.float64)
    x = x - x.mean(axis=0)
    eigenvalues, vectors = np.linalg.eigh(x.T @ x)
    order = np.argsort(eigenvalues)[::-1][:components]
    total = max(float(eigenvalues.sum()), 1e-300)
    return x @ vectors[:, order], eigenvalues[order] / total


def tsne(features: np.ndarray, perplexity: float = PERPLEXITY) -> np.ndarray | None:
    """Returns the t-SNE [N, 2] of features (van der Maaten and Hinton 2008); None without scikit-learn."""
    try:
        from sklearn.manifold import TSNE
    except ImportError:
        return None
    x = pca(features, min(TSNE_COMPONENTS, features.shape[1]))[0].astype(np.float32)
    perplexity = min(perplexity, (len(x) - 1) / 3)
    init = "pca" if x.shape[1] > 1 else "random"
    return TSNE(perplexity=perplexity, init=init, random_state=0).fit_transform(x)


def patch_colours(maps: np.ndarray) -> np.ndarray:
    """Returns the three principal components of patch features [B, gh, gw, F] as colours, uint8 [B, gh, gw, 3].

    The components are those of all images together, so that a colour means the same in each of them.
    """
    coordinates, _ = pca(maps.reshape(-1, maps.shape[-1]), 3)
    low, high = np.percentile(coordinates, (2, 98), axis=0)
    unit = np.clip((coordinates - low) / np.maximum(high - low, 1e-12), 0, 1)
    colours = np.zeros((len(unit), 3))
    colours[:, : unit.shape[1]] = unit
    return (255 * colours + 0.5).astype(np.uint8).reshape(*maps.shape[:3], 3)
