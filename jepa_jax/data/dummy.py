"""Stand-in data for measurements: as many elements as a data set has, drawn anew for every batch."""

from collections.abc import Mapping

import jax
import numpy as np

from jepa_jax.config.augment import Crops
from jepa_jax.config.groups import DataConfig
from jepa_jax.data.contract import Spec
from jepa_jax.data.facts import data_facts
from jepa_jax.data.in_memory import Arrays
from jepa_jax.data.photos.crops import cropped_spec
from jepa_jax.data.synthetic import SMALLEST, SPLIT_STREAMS, render_shapes


class DummySource:
    """Draws elements of any spec in whichever process loads the batch, so that a loader has work to do.

    uint8 [H, W, C] becomes a picture of shapes, "label" a class, and any other array random numbers: floats in [0, 1),
    uint8 in 0..255, and 0 or 1 for other integers, which are valid as a count, an index or a mask.
    """

    def __init__(self, spec: Spec, count: int, *, num_classes: int, split: str):
        self.spec, self.classes = spec, tuple(str(i) for i in range(num_classes))
        self._count, self._split = count, split

    def __len__(self) -> int:
        return self._count

    def batch(self, indices: np.ndarray) -> Arrays:
        rng = np.random.default_rng([SPLIT_STREAMS[self._split], int(indices[0])])
        return {key: self._draw(key, one, np.asarray(indices), rng) for key, one in self.spec.items()}

    def cropped(self, crops: Mapping[str, Crops], seed: int, epoch: int) -> "DummySource":
        del seed, epoch
        return DummySource(
            cropped_spec(self.spec, crops), self._count, num_classes=len(self.classes), split=self._split
        )

    def _draw(self, key: str, one: jax.ShapeDtypeStruct, indices: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        if key == "label" and self.classes:
            return (indices % len(self.classes)).astype(one.dtype)
        if one.dtype == np.uint8 and len(one.shape) == 3:
            height, width, channels = one.shape
            size = max(height, width, SMALLEST)
            images = render_shapes(indices, size=size, seed=0, split=self._split)["image"][:, :height, :width]
            return np.ascontiguousarray(images[..., np.arange(channels) % 3])
        shape = (len(indices), *one.shape)
        if np.issubdtype(one.dtype, np.floating):
            return rng.random(shape, np.float32).astype(one.dtype)
        return rng.integers(256 if one.dtype == np.uint8 else 2, size=shape).astype(one.dtype)


def open_dummy(data: DataConfig, split: str) -> DummySource:
    """Opens stand-in data of a config, like `open_source`; the files of the data set need not be there."""
    facts = data_facts(data, assume=True)
    count = facts.num_train if split == "train" else data.num_test or max(1, facts.num_train // 5)
    return DummySource(facts.spec, count, num_classes=facts.num_classes, split=split)
