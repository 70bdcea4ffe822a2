"""Sources in which each element has the wind of another fire, to measure how much a model relies on wind."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jepa_jax.data.contract import Source


class ShuffledWind:
    """Gives each element of a source the wind of another fire, as a control.

    An element gets the last frames of that wind; a longer history repeats its first frame.
    """

    classes = ()

    def __init__(self, source: Source, donors: np.ndarray):
        """Takes the index of the element whose wind each one gets, `donors` [N]."""
        self._source, self._donors, self.spec = source, donors, source.spec

    def __len__(self) -> int:
        return len(self._source)

    def batch(self, indices: np.ndarray) -> dict[str, Any]:
        own, other = self._source.batch(indices), self._source.batch(self._donors[indices])
        return {**own, "wind": _fitted(other, own["valid"])}


def _fitted(other: Mapping[str, np.ndarray], valid: np.ndarray) -> np.ndarray:
    """Returns wind [B, T, 2] for histories that are `valid` [B, T] from histories that may be shorter or longer."""
    first = np.argmax(other["valid"], axis=1)[:, None]
    frame = np.maximum(np.arange(valid.shape[1]), first)  # [B, T]
    return np.take_along_axis(other["wind"], frame[..., None], axis=1) * valid[..., None]


def wind_donors(fires: np.ndarray) -> np.ndarray:
    """Returns a permutation that gives each element one of another fire, unless a fire has more than half of them."""
    order = np.argsort(fires, kind="stable")
    others = np.empty_like(order)
    others[order] = np.roll(order, len(order) // 2)
    return others
