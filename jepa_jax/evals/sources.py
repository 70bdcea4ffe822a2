"""Parts and augmented views of a data source, as sources that evaluations read."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jepa_jax.data.augment import augment_views
from jepa_jax.data.contract import Source, sample
from jepa_jax.data.sources import OnSkipped, Subset, subset


def part_of(source: Source, count: int, on_skipped: OnSkipped = lambda names: None) -> Subset:
    """Returns a sample of `count` elements of a source (0 = all)."""
    return subset(source, sample(len(source), count), on_skipped)


class ViewSource:
    """Augmented views of all images of a source; view v of image i is element i * views + v."""

    def __init__(self, augment: Any, source: Source, views: int):
        self._augment, self._source, self._views = augment, source, views
        height, width, channels = source.spec["image"].shape
        shape = (augment.crop.size or height, augment.crop.size or width, channels)
        self.classes, self.spec = source.classes, {**source.spec, "image": jax.ShapeDtypeStruct(shape, np.uint8)}

    def __len__(self) -> int:
        return len(self._source) * self._views

    def batch(self, indices: np.ndarray) -> dict[str, Any]:
        whole = np.unique(indices // self._views)
        padded = np.resize(whole, -(-len(indices) // self._views) + 2)  # one shape, one compilation
        batch = self._source.batch(padded)
        key = jax.random.key(int(whole[0]))
        views = np.asarray(_draw(key, batch["image"], self._augment, self._views))  # [V, B, h, w, C]
        place = np.searchsorted(whole, indices // self._views)
        return {name: batch[name][place] for name in self.spec} | {"image": views[indices % self._views, place]}


@functools.partial(jax.jit, static_argnames=("augment", "views"))
def _draw(key: jax.Array, images: jax.Array, augment: Any, views: int) -> jax.Array:
    """Returns random views [V, B, h, w, C] in uint8, which encoders take."""
    mean, std = np.asarray(augment.mean, np.float32), np.asarray(augment.std, np.float32)
    unit = augment_views(key, images, augment, views) * std + mean
    return jnp.clip(255 * unit + 0.5, 0, 255).astype(jnp.uint8)
