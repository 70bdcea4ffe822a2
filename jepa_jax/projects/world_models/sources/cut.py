"""Sequences that are cut out of longer recordings."""

from collections.abc import Sequence

import numpy as np

from jepa_jax.config.groups import DataConfig
from jepa_jax.data.contract import sample
from jepa_jax.data.in_memory import num_used


class CutSequences:
    """The base of sources whose elements are parts of recordings; the parts of a recording are a group."""

    classes = ()

    def __init__(self, data: DataConfig, split: str, places: Sequence[tuple[int, int]]):
        """Keeps as many places as the config asks for; each is the number of a recording and of its first frame."""
        self._places = np.array(places)[sample(len(places), num_used(data, split, len(places)))]

    def __len__(self) -> int:
        return len(self._places)

    @property
    def groups(self) -> np.ndarray:
        return self._places[:, 0]
