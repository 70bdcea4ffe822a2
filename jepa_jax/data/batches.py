"""The batches of a run as a Grain dataset: its element n is batch n.

Which samples form batch n is a pure function of (seed, n). So the position of a run is one number, every pipeline and
any number of workers give the same batches, and a run resumes exactly by starting at its step.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import grain
import jax
import numpy as np
from ml_collections import ConfigDict

from jepa_jax.base.errors import DataLost, UserError
from jepa_jax.config.augment import Crops
from jepa_jax.config.groups import Config
from jepa_jax.config.resolve import resolve
from jepa_jax.data.contract import Bucketed, Cropping, Source, check_arrays
from jepa_jax.data.elements import StreamSource
from jepa_jax.data.sources import open_source

Batch = dict[str, Any]  # arrays [B, ...], and under "skipped" the names of unreadable files if there are any


def dataset(config: Config | ConfigDict | Mapping[str, Any], split: str = "train") -> Any:
    """Returns the batches of a run: element n is this process's part of what step n sees.

    It is a grain.MapDataset, or a grain.IterDataset if the data are a stream.

    Args:
      config: of the run.
      split: "train", or "test" or "validation" for their batches in the same kind of order.
    """
    config = config if isinstance(config, Config) else resolve(config)
    return batch_dataset(
        open_source(config.data, split),
        config.data.batch_size,
        seed=config.train.seed,
        crops=config.loader_crops,
        process_index=jax.process_index(),
        process_count=jax.process_count(),
    )


def batch_dataset(
    source: Source,
    batch_size: int,
    *,
    seed: int = 0,
    crops: Mapping[str, Crops] | None = None,
    process_index: int = 0,
    process_count: int = 1,
) -> grain.MapDataset | grain.IterDataset:
    """Returns an endless dataset whose element n is this process's part of batch n.

    Every epoch is a fresh order of all samples, without its incomplete last batch; a stream is read in its own order,
    again and again. Batches of a Bucketed source have the size of their bucket. With `crops` (`config.loader_crops`),
    they have crops of full photographs instead of "image".
    """
    steps, how = steps_per_epoch(len(source), batch_size), (seed, crops or {}, process_index, process_count)
    if isinstance(source, StreamSource):
        elements = grain.experimental.RepeatIterDataset(source.stream).batch(batch_size, batch_fn=list)
        return elements.map_with_index(ReadBatch(source.made, 1, *how))
    order = batch_order(len(source), batch_size, seed, source.buckets if isinstance(source, Bucketed) else None)
    return order.map_with_index(ReadBatch(source, steps, *how))


def batch_order(num_samples: int, batch_size: int, seed: int, buckets: np.ndarray | None = None) -> grain.MapDataset:
    """Returns an endless dataset whose element n is the sample numbers of batch n, int64 [batch_size]."""
    steps_per_epoch(num_samples, batch_size)  # raises
    if buckets is not None:
        return BucketedOrder(buckets, batch_size, seed).repeat()
    samples = grain.MapDataset.range(num_samples).seed(_word(seed)).shuffle()
    return samples.batch(batch_size, drop_remainder=True, batch_fn=np.asarray).repeat()


def steps_per_epoch(num_samples: int, batch_size: int) -> int:
    """Returns the number of whole batches; raises UserError if there is none."""
    if batch_size > num_samples:
        raise UserError(
            f"config.data.batch_size = {batch_size}: the train split has {num_samples} samples; "
            f"use data.batch_size <= {num_samples} or more data"
        )
    return num_samples // batch_size


def _word(seed: int) -> int:
    """Returns a seed of 32 bits; Grain adds the epoch to it, so consecutive seeds must be far from each other."""
    return int(np.random.SeedSequence(seed % 2**63).generate_state(1)[0])


class BucketedOrder(grain.MapDataset):
    """The sample numbers of each batch of an epoch: sorted into batches of one bucket, in random order.

    Only where two buckets meet does a batch have samples of both.
    """

    def __init__(self, buckets: np.ndarray, batch_size: int, seed: int):
        super().__init__()
        self._buckets, self._batch_size, self._seed = buckets, batch_size, seed % 2**63

    def __len__(self) -> int:
        return len(self._buckets) // self._batch_size

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.slice(index)
        epoch, place = divmod(index, len(self))
        return self._epoch(epoch)[place]

    def __str__(self) -> str:
        return f"BucketedOrder(batch_size={self._batch_size})"

    @functools.cached_property
    def _epoch(self) -> Any:
        return functools.lru_cache(maxsize=2)(self._order)  # two, for threads on both sides of an epoch's end

    def _order(self, epoch: int) -> np.ndarray:
        order = np.random.default_rng([self._seed, epoch]).permutation(len(self._buckets))
        order = order[: len(self) * self._batch_size]
        batches = order[np.argsort(self._buckets[order], kind="stable")].reshape(-1, self._batch_size)
        batches = np.random.default_rng([self._seed, epoch, 1]).permutation(batches)
        batches.setflags(write=False)
        return batches

    def __reduce__(self) -> tuple[Any, ...]:
        return BucketedOrder, (self._buckets, self._batch_size, self._seed)  # without what is cached


@dataclasses.dataclass(frozen=True)
class ReadBatch:
    """Reads this process's part of batch n, given the sample numbers or the elements of the whole batch.

    Attributes:
      source: what sample numbers count; or, of a stream, what makes a source of elements.
      steps_per_epoch: 1 for a stream.
    """

    source: Source | Callable[[Sequence[Any]], Source]
    steps_per_epoch: int
    seed: int
    crops: Mapping[str, Crops]
    process_index: int
    process_count: int

    def __call__(self, n: int, chosen: Any) -> Batch:
        source, indices = self.source, chosen
        if not isinstance(source, Source):
            source, indices = source(chosen), np.arange(len(chosen))
        if isinstance(source, Bucketed):  # the bucket of the whole batch: every process has the same shapes
            source = source.in_bucket(int(source.buckets[indices].max()))
        if isinstance(source, Cropping) and self.crops:
            source = source.cropped(self.crops, self.seed, n // self.steps_per_epoch)
        local = len(indices) // self.process_count
        try:
            loaded = source.batch(indices[self.process_index * local : (self.process_index + 1) * local])
        except OSError as error:
            what = f"{error.filename or 'config.data.dir'}: cannot be read any more ({error.strerror or error})"
            raise DataLost(f"{what}; check the file and the disk it is on") from error
        check_arrays(loaded, source.spec, local)
        skipped = list(loaded.get("skipped", ()))
        return {key: loaded[key] for key in source.spec} | ({"skipped": skipped} if skipped else {})
