"""Gradient boosting of single pixels: what trees know of a pixel by its neighbourhood, wind and terrain."""

from typing import Any, NamedTuple

import numpy as np
import scipy.ndimage

from jepa_jax.base.errors import UserError
from jepa_jax.data.contract import Source
from jepa_jax.evals.features import OnCount, ignore, part_of
from jepa_jax.projects.wildfire.evals.baselines import Arrays, distance, downwind, host_batches, last_frame

FITTED_SHARE, FEWEST_FITTED = 0.25, 256  # of the training elements
FITTED_PIXELS = 2**18  # of these elements, at most
NEAR = 6.0  # pixels from the last mask; farther ones are drawn a tenth as often
FAR_ODDS = 0.1
UPWIND, ACROSS = (-1, 0, 1, 2, 3), (-1, 0, 1)  # pixels from each one at which features look along the wind
TREES: dict[str, Any] = {"max_iter": 200, "learning_rate": 0.08, "early_stopping": False, "random_state": 0}


class Boosting(NamedTuple):
    """Boosted trees on features of single pixels; None where nothing, or everything, burned in training."""

    trees: Any

    def __call__(self, batch: Arrays) -> np.ndarray:
        """Returns logits [B, H, W]."""
        if self.trees is None:
            return np.zeros(last_frame(batch).shape)
        features = neighbourhood_features(batch)
        return self.trees.decision_function(features.reshape(-1, features.shape[-1])).reshape(features.shape[:-1])


def import_boosting() -> type:
    """Returns scikit-learn's class of boosted trees; raises UserError without scikit-learn."""
    try:
        from sklearn.ensemble import HistGradientBoostingClassifier
    except ImportError:
        raise UserError(
            "next_mask: its strongest baseline needs scikit-learn; pip install 'jepa_jax[sklearn]'"
        ) from None
    return HistGradientBoostingClassifier


def fit_boosting(train: Source, on_elements: OnCount = ignore) -> Boosting:
    """Fits trees on pixels of FITTED_SHARE of the training elements (FEWEST_FITTED if more), drawn with a fixed seed.

    Which pixels are drawn depends on their features alone, so that probabilities stay what they are.
    """
    train = part_of(train, max(FEWEST_FITTED, round(FITTED_SHARE * len(train))))
    rng, most = np.random.default_rng(0), FITTED_PIXELS / len(train)  # pixels per element
    features, labels = [], []
    for indices, batch in host_batches(train):
        near = distance(last_frame(batch)) <= NEAR
        odds = np.where(near, 1.0, FAR_ODDS)
        odds *= np.minimum(1, most / np.maximum(odds.sum((1, 2), keepdims=True), 1))
        drawn = batch["known"][..., 0] & (rng.random(odds.shape) < odds)
        features.append(neighbourhood_features(batch)[drawn])
        labels.append(batch["target"][..., 0][drawn])
        on_elements(len(indices))
    x, y = np.concatenate(features), np.concatenate(labels)
    return Boosting(import_boosting()(**TREES).fit(x, y) if y.any() and not y.all() else None)


def neighbourhood_features(batch: Arrays) -> np.ndarray:
    """Returns features of each pixel [B, H, W, F] in float32.

    They are the last mask of 3 x 3 pixels and for how many frames each of 5 x 5 pixels has burned, the distance and the
    way to the last mask, speed and direction of the last wind, how far it blows along that way and out of a front
    nearby, how recently pixels upwind and across began to burn, and the static channels with their slopes.
    """
    burning = last_frame(batch)
    ages = np.asarray(batch["fire"])[..., 0].sum(axis=1, dtype=np.float32)  # padding never burns
    speed, direction = np.asarray(batch["wind"])[:, -1].T
    angle = 2 * np.pi * direction
    towards = (speed * np.cos(angle), -speed * np.sin(angle))  # rows grow southwards, columns eastwards
    way = ways(burning)
    length = np.maximum(np.hypot(way[..., 0], way[..., 1]), 1)
    along = sum(one[:, None, None] * way[..., axis] for axis, one in enumerate(towards)) / length
    winds = [np.broadcast_to(one[:, None, None], burning.shape) for one in (speed, *towards)]
    mask = burning.astype(np.float32)
    shares = [scipy.ndimage.uniform_filter(mask, (1, side, side), mode="constant") for side in (3, 5)]
    fronts = [downwind(share, speed, angle) for share in shares]
    recent = np.divide(1, ages, out=np.zeros_like(ages), where=ages > 0)
    static = np.asarray(batch["static"])
    maps = [
        *window(burning, 3), *window(ages, 5), *np.moveaxis(way, -1, 0), length, along, *winds, *fronts,
        *aligned(recent, angle),
    ]  # fmt: skip
    return np.concatenate([np.stack(maps, -1), static, *np.gradient(static, axis=(1, 2))], -1, dtype=np.float32)


def aligned(maps: np.ndarray, angle: np.ndarray) -> list[np.ndarray]:
    """Returns the values [B, H, W] at UPWIND and ACROSS from each pixel, interpolated, 0 beyond the border.

    `angle` [B] is the direction that the wind comes from, clockwise from north in radians.
    """
    upwind = np.stack([-np.cos(angle), np.sin(angle)], axis=-1)  # rows and columns
    right = np.stack([upwind[:, 1], -upwind[:, 0]], axis=-1)
    return [
        np.stack([
            scipy.ndimage.shift(one, -way, order=1, mode="constant")
            for one, way in zip(maps, along * upwind + across * right, strict=True)
        ])
        for along in UPWIND
        for across in ACROSS
        if along or across
    ]  # fmt: skip


def window(maps: np.ndarray, side: int) -> list[np.ndarray]:
    """Returns the values [B, H, W] of the neighbours of each pixel in a square, 0 beyond the border."""
    reach = side // 2
    padded = np.pad(maps, ((0, 0), (reach, reach), (reach, reach)))
    height, width = maps.shape[1:]
    return [padded[:, row : row + height, column : column + width] for row in range(side) for column in range(side)]


def ways(burning: np.ndarray) -> np.ndarray:
    """Returns the rows and columns [B, H, W, 2] from the nearest burning pixel to each one; 0 if nothing burns."""
    own = np.indices(burning.shape[1:])
    each = [
        own - scipy.ndimage.distance_transform_edt(~mask, return_distances=False, return_indices=True)
        if mask.any()
        else np.zeros_like(own)
        for mask in burning
    ]
    return np.moveaxis(np.stack(each), 1, -1)
