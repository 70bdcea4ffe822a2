"""Which samples form batch n, and how one process loads its part of them.

The samples of batch n are a pure function of (seed, n). So the position of a run is one number, every pipeline and any
number of workers give the same batches, and a run resumes exactly by starting at its step.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import grain
import numpy as np

from jepa_jax.base.errors import DataLost, UserError
from jepa_jax.config.augment import Crops
from jepa_jax.data.contract import Bucketed, Cropping, Source

LAST_STEP = 1 << 40  # the stream has no end; the loop decides when to stop


@dataclasses.dataclass(frozen=True)
class BatchPlan:
    """Which samples form batch n: a fresh permutation per epoch, without its incomplete last batch.

    With `buckets` [num_samples], the samples of an epoch are sorted into batches of one bucket, in random order; only
    where two buckets meet does a batch have samples of both.
    """

    num_samples: int
    batch_size: int
    seed: int = 0
    buckets: np.ndarray | None = dataclasses.field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.batch_size > self.num_samples:
            raise UserError(
                f"config.data.batch_size = {self.batch_size}: the train split has {self.num_samples} samples; "
                f"use data.batch_size <= {self.num_samples} or more data"
            )

    @property
    def steps_per_epoch(self) -> int:
        return self.num_samples // self.batch_size

    def indices(self, n: int) -> np.ndarray:
        """Returns the sample numbers of batch n, int64 [batch_size]."""
        epoch, place = divmod(n, self.steps_per_epoch)
        return self._cached_order(epoch)[place * self.batch_size : (place + 1) * self.batch_size]

    @functools.cached_property
    def _cached_order(self) -> Callable[[int], np.ndarray]:
        return functools.lru_cache(maxsize=2)(self._order)  # two, for threads on both sides of an epoch's end

    def _order(self, epoch: int) -> np.ndarray:
        order = np.random.default_rng([self.seed % 2**63, epoch]).permutation(self.num_samples)
        if self.buckets is not None:
            order = order[: self.steps_per_epoch * self.batch_size]
            batches = order[np.argsort(self.buckets[order], kind="stable")].reshape(-1, self.batch_size)
            order = np.random.default_rng([self.seed % 2**63, epoch, 1]).permutation(batches).ravel()
        order.setflags(write=False)
        return order

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}  # without the cache


@dataclasses.dataclass(frozen=True)
class BatchLoader:
    """Loads this process's part of batch n, with the seconds it took; runs inside workers."""

    plan: BatchPlan
    source: Source
    process_index: int = 0
    process_count: int = 1
    crops: Mapping[str, Crops] = dataclasses.field(default_factory=dict)  # of a Cropping source; empty for images

    def __call__(self, step: int) -> dict[str, Any]:
        start = time.perf_counter()
        local = self.plan.batch_size // self.process_count
        indices, source = self.plan.indices(step), self.source
        if isinstance(source, Bucketed):  # the bucket of the whole batch: every process has the same shapes
            source = source.in_bucket(int(source.buckets[indices].max()))
        if isinstance(source, Cropping) and self.crops:
            source = source.cropped(self.crops, self.plan.seed, step // self.plan.steps_per_epoch)
        own = indices[self.process_index * local : (self.process_index + 1) * local]
        try:
            loaded = source.batch(own)
        except OSError as error:
            what = f"{error.filename or 'config.data.dir'}: cannot be read any more ({error.strerror or error})"
            raise DataLost(f"{what}; check the file and the disk it is on") from error
        return {
            "batch": {key: loaded[key] for key in source.spec},
            "skipped": list(loaded.get("skipped", ())),
            "seconds": time.perf_counter() - start,
        }


def loaded_batches(loader: BatchLoader, first_step: int, stride: int = 1) -> Iterator[dict[str, Any]]:
    """Returns what `loader` makes of steps `first_step`, `first_step + stride`, ... without end."""
    steps = grain.MapDataset.range(first_step, LAST_STEP, stride).map(loader)
    # No reader threads of Grain's: the prefetch thread is one, and a source that decodes has its own.
    return iter(steps.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)))
