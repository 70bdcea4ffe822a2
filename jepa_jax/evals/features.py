"""Features of a whole split, extracted once in fixed-size batches."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import jax
import numpy as np

from jepa_jax.data.contract import Source
from jepa_jax.data.pipeline import eval_batches
from jepa_jax.runtime.mesh import whole_array

HELD_OUT = 0.1


class Split(NamedTuple):
    """Features [N, F] in float32 and labels [N]."""

    features: np.ndarray
    labels: np.ndarray


def held_out_split(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Which of `count` training images to fit on and which to choose by: a fixed random tenth, at least one image."""
    order = np.random.default_rng(0).permutation(count)
    held_out = max(1, round(HELD_OUT * count))
    return order[held_out:], order[:held_out]


class FirstImages:
    """The first `count` images of a source (0 = all)."""

    def __init__(self, source: Source, count: int, on_skipped: Callable[[Iterable[str]], None] = lambda names: None):
        self._source, self._count = source, min(count or len(source), len(source))
        self._on_skipped = on_skipped
        self.classes, self.spec = source.classes, source.spec

    def __len__(self) -> int:
        return self._count

    def batch(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        batch = self._source.batch(indices)
        self._on_skipped(batch.get("skipped", ()))
        return batch


def extract(
    encode: Callable[[jax.Array], jax.Array],
    source: Source,
    *,
    batch_size: int,
    sharding: jax.sharding.NamedSharding,
    on_batch: Callable[[int], None] = lambda images: None,
) -> Split:
    """Features of every image in order; `encode` maps a uint8 batch to [B, F]; `on_batch` hears the images done."""
    features, labels = [], []
    batches = eval_batches(
        source, batch_size, sharding, process_index=jax.process_index(), process_count=jax.process_count()
    )
    pending: tuple[jax.Array, jax.Array, int] | None = None

    def collect(item):
        encoded, label, valid = item
        features.append(np.asarray(encoded)[:valid])
        labels.append(whole_array(label)[:valid])
        on_batch(valid)

    for batch, valid in batches:
        encoded = encode(batch["image"])  # dispatched; the previous batch is read while this one computes
        if pending is not None:
            collect(pending)
        pending = (encoded, batch["label"], valid)
    if pending is not None:
        collect(pending)
    return Split(np.concatenate(features), np.concatenate(labels))
