"""Readouts of maps: each cell's numbers, from the latents of the cell and its eight neighbours.

Solved in closed form on *encoded* frames of the train split, so that there is no rate and no seed to choose.
"""

from typing import NamedTuple

import numpy as np

from jepa_jax.evals.features import held_out_split
from jepa_jax.evals.linear_probe import Standard
from jepa_jax.evals.ridge_probe import PENALTIES, mean_r2, ridge_predictions

HIDDEN = 256  # fixed random features beside the latents themselves
FITTED_CELLS = 16_384  # drawn at random


class CellReadout(NamedTuple):
    """A linear function of standardised neighbourhoods and of fixed random features of them."""

    standard: Standard
    projection: np.ndarray
    weights: np.ndarray
    offset: np.ndarray

    def __call__(self, latents: np.ndarray) -> np.ndarray:
        """Returns what is read from latents [..., g, g, d]: [..., g, g, k] in float32."""
        maps = latents.reshape(-1, *latents.shape[-3:])
        chunks = np.array_split(maps, max(1, len(maps) // 256))
        read = [self._features(neighbourhoods(chunk)) @ self.weights + self.offset for chunk in chunks]
        return np.concatenate(read).reshape(*latents.shape[:-1], -1)

    def _features(self, x: np.ndarray) -> np.ndarray:
        return random_features(self.standard(x), self.projection)


def fit_cells(latents: np.ndarray, targets: np.ndarray) -> CellReadout:
    """Fits on latents [N, g, g, d] and what their cells should give [N, g, g, k]; the penalty by a held-out tenth."""
    rng = np.random.default_rng(0)
    cells = neighbourhoods(latents).reshape(-1, 9 * latents.shape[-1])
    chosen = rng.permutation(len(cells))[:FITTED_CELLS]
    x, y = cells[chosen], targets.reshape(len(cells), -1)[chosen].astype(np.float64)
    standard = Standard.of(x)
    projection = (rng.standard_normal((x.shape[1] + 1, HIDDEN)) / np.sqrt(x.shape[1])).astype(np.float32)
    features = random_features(standard(x), projection).astype(np.float64)
    fit_part, score_part = held_out_split(len(x))
    tried = ridge_predictions(features[fit_part], y[fit_part], features[score_part], PENALTIES)
    scores = [mean_r2(predicted, y[score_part]) for predicted in tried]
    best = PENALTIES[int(np.argmax([-np.inf if score is None else score for score in scores]))]
    centre, mean = features.mean(axis=0), y.mean(axis=0)
    gram = (features - centre).T @ (features - centre) / len(x) + best * np.eye(features.shape[1])
    weights = np.linalg.solve(gram, (features - centre).T @ (y - mean) / len(x))
    offset = mean - centre @ weights
    return CellReadout(standard, projection, weights.astype(np.float32), offset.astype(np.float32))


def neighbourhoods(maps: np.ndarray) -> np.ndarray:
    """Returns the latents of each cell and its neighbours, zeros beyond the border: [N, g, g, 9 d]."""
    padded = np.pad(maps, ((0, 0), (1, 1), (1, 1), (0, 0)))
    rows, columns = maps.shape[1:3]
    parts = [padded[:, i : i + rows, j : j + columns] for i in range(3) for j in range(3)]
    return np.concatenate(parts, axis=-1).astype(np.float32)


def random_features(x: np.ndarray, projection: np.ndarray) -> np.ndarray:
    """Returns x and ReLUs of fixed random directions of it."""
    return np.concatenate([x, np.maximum(x @ projection[:-1] + projection[-1], 0)], axis=-1)


def cell_pixels(frames: np.ndarray, side: int) -> np.ndarray:
    """Returns the pixels in 0..1 of each cell of frames [N, H, W, C]: [N, side, side, (H / side) (W / side) C]."""
    count, height, width, channels = frames.shape
    x = frames.reshape(count, side, height // side, side, width // side, channels).transpose(0, 1, 3, 2, 4, 5)
    return x.reshape(count, side, side, -1).astype(np.float32) / 255


def frames_of(pixels: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Returns uint8 frames [..., H, W, C] from what `cell_pixels` gives of them."""
    *outer, side, _, _ = pixels.shape
    height, width, channels = shape
    x = pixels.reshape(-1, side, side, height // side, width // side, channels).transpose(0, 1, 3, 2, 4, 5)
    return np.clip(255 * x + 0.5, 0, 255).astype(np.uint8).reshape(*outer, *shape)


def average_precision(scores: np.ndarray, truth: np.ndarray) -> float | None:
    """Returns the area under the precision-recall curve as the sum over thresholds; None without a positive."""
    order = np.argsort(-scores, axis=None, kind="stable")
    scores, truth = scores.ravel()[order], truth.ravel()[order]
    ends = np.append(np.flatnonzero(np.diff(scores)), len(scores) - 1)  # equal scores share a threshold
    hits = np.cumsum(truth)[ends]
    if not hits[-1]:
        return None
    gained = np.diff(hits, prepend=0)
    return float(np.sum(gained * hits / (ends + 1)) / hits[-1])
