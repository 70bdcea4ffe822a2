"""Finds what an encoder takes for alike: the images nearest to some others, and a map of many of them."""

from collections.abc import Sequence

import numpy as np
import PIL.Image

from jepa_jax.data.contract import Source, sample
from jepa_jax.data.pictures import rgb
from jepa_jax.evals.knn import unit_length

QUERIES, NEIGHBOURS = 12, 5  # images that are shown, and how many neighbours of each
PIXELS = 64  # per side of the copies that are kept
MAPPED = 200  # images on a map


def nearest(features: np.ndarray, queries: Sequence[int], count: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the places [Q, count] of the images nearest to some of them, nearest first, and their cosines."""
    unit = unit_length(features)
    cosines = unit[list(queries)] @ unit.T
    cosines[np.arange(len(queries)), list(queries)] = -np.inf  # an image is no neighbour of itself
    order = np.argsort(-cosines, axis=1, kind="stable")[:, : min(count, len(features) - 1)]
    return order, np.take_along_axis(cosines, order, axis=1)


def shown_places(features: np.ndarray) -> np.ndarray:
    """Returns the places [Q, 1 + neighbours] of a sample of images, each followed by its nearest ones."""
    queries = sample(len(features), min(QUERIES, len(features)))
    return np.concatenate([queries[:, None], nearest(features, queries.tolist(), NEIGHBOURS)[0]], axis=1)


def small_copies(source: Source, places: np.ndarray) -> np.ndarray:
    """Returns the images of a source at these places, small and as RGB: uint8 [*places.shape, h, w, 3]."""
    wanted, where = np.unique(places, return_inverse=True)
    copies = []
    for image in source.batch(wanted)["image"]:
        picture = PIL.Image.fromarray(rgb(np.asarray(image)))
        if max(picture.size) > PIXELS:
            picture = picture.resize((PIXELS, PIXELS), PIL.Image.Resampling.LANCZOS)
        copies.append(np.asarray(picture))
    return np.stack(copies)[where.reshape(places.shape)]


def pca(features: np.ndarray, components: int = 2) -> tuple[np.ndarray, np.ndarray]:
    """Returns coordinates [N, components] and the share of the variance that each component holds."""
    x = np.asarray(features, np.float64)
    x = x - x.mean(axis=0)
    eigenvalues, vectors = np.linalg.eigh(x.T @ x)
    order = np.argsort(eigenvalues)[::-1][:components]
    total = max(float(eigenvalues.sum()), 1e-300)
    return x @ vectors[:, order], eigenvalues[order] / total
