"""The batches of a run as a Grain dataset: its element n is batch n.

Which samples form batch n is a pure function of (seed, n). So the position of a run is one number, every pipeline and
any number of workers give the same batches, and a run resumes exactly by starting at its step.
"""

import dataclasses
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import grain
import numpy as np

from jepa_jax.base.errors import DataLost, UserError
from jepa_jax.config.augment import Crops
from jepa_jax.data.contract import Bucketed, Cropping, Source, check_arrays
from jepa_jax.data.elements import StreamSource

ROUNDS = 4  # of the cipher that permutes numbers, as in Grain's `shuffle`

Batch = dict[str, Any]  # arrays [B, ...], and under "skipped" the names of unreadable files if there are any


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
    order = SampleOrder(len(source), batch_size, seed, source.buckets if isinstance(source, Bucketed) else None)
    how = (batch_size, seed, crops or {}, process_index, process_count)
    if isinstance(source, StreamSource):
        elements = grain.experimental.RepeatIterDataset(source.stream).batch(batch_size, batch_fn=list)
        return elements.map_with_index(ReadBatch(source.made, 1, *how))
    return BatchDataset(order, ReadBatch(source, order.steps_per_epoch, *how))


class SampleOrder(grain.MapDataset):
    """Endless: element n is the sample numbers of batch n, int64 [batch_size].

    The order of an epoch is that of Grain's `shuffle`, for which nothing is stored. With `buckets`, the samples of an
    epoch are instead permuted and sorted into batches of one bucket, in random order; only where two buckets meet does
    a batch have samples of both.

    Raises:
      UserError: there is no whole batch.
    """

    def __init__(self, num_samples: int, batch_size: int, seed: int = 0, buckets: np.ndarray | None = None):
        super().__init__()
        if batch_size > num_samples:
            raise UserError(
                f"config.data.batch_size = {batch_size}: the train split has {num_samples} samples; "
                f"use data.batch_size <= {num_samples} or more data"
            )
        self._arguments = num_samples, batch_size, seed, buckets
        self.steps_per_epoch = num_samples // batch_size
        # Grain adds the epoch to a seed of 32 bits, so consecutive seeds must be far from each other.
        word = np.random.SeedSequence(seed % 2**63).generate_state(1)[0]
        self._word = int(np.random.SeedSequence((word, 1)).generate_state(1)[0])  # as for `.seed(word).shuffle()`

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.slice(index)
        num_samples, size, _, buckets = self._arguments
        epoch, place = divmod(index, self.steps_per_epoch)
        if buckets is not None:
            return self._bucketed(epoch)[place]
        last, seed, first = num_samples - 1, (self._word + epoch) % 2**32, place * size
        shuffled = grain.experimental.index_shuffle
        return np.array([shuffled(number, last, seed, ROUNDS) for number in range(first, first + size)])

    @functools.cached_property
    def _bucketed(self) -> Callable[[int], np.ndarray]:
        return functools.lru_cache(maxsize=2)(self._order)  # two, for threads on both sides of an epoch's end

    def _order(self, epoch: int) -> np.ndarray:
        num_samples, size, seed, buckets = self._arguments
        assert buckets is not None
        order = np.random.default_rng([seed % 2**63, epoch]).permutation(num_samples)
        order = order[: self.steps_per_epoch * size]
        batches = order[np.argsort(buckets[order], kind="stable")].reshape(-1, size)
        batches = np.random.default_rng([seed % 2**63, epoch, 1]).permutation(batches)
        batches.setflags(write=False)
        return batches

    def __reduce__(self) -> tuple[Any, ...]:
        return SampleOrder, self._arguments  # without what is cached


class BatchDataset(grain.MapDataset):
    """What `read` makes of the sample numbers of each batch."""

    def __init__(self, order: SampleOrder, read: "ReadBatch"):
        super().__init__(order)
        self._read = read

    def __len__(self) -> int:
        return len(self._parent)

    def __getitem__(self, index: Any) -> Any:
        return self.slice(index) if isinstance(index, slice) else self._read(index, self._parent[index])

    def __repr__(self) -> str:
        order, read = self._parent, self._read
        source = read.source_in(0)
        about = f"BatchDataset of {type(read.source).__name__}, {len(source):,} elements"
        lines = [f"{name} {one.dtype}{[read.local_size, *one.shape]}" for name, one in source.spec.items()]
        return "\n  ".join([f"{about}, {order.steps_per_epoch:,} batches per epoch, endless; [n] is batch n:", *lines])

    __str__ = __repr__


@dataclasses.dataclass(frozen=True)
class ReadBatch:
    """Reads this process's part of batch n, given the sample numbers or the elements of the whole batch.

    Attributes:
      source: what sample numbers count; or, of a stream, what makes a source of elements.
      steps_per_epoch: 1 for a stream.
    """

    source: Source | Callable[[Sequence[Any]], Source]
    steps_per_epoch: int
    batch_size: int
    seed: int
    crops: Mapping[str, Crops]
    process_index: int
    process_count: int

    @property
    def local_size(self) -> int:
        return self.batch_size // self.process_count

    def __call__(self, n: int, chosen: Any) -> Batch:
        indices = chosen if isinstance(self.source, Source) else np.arange(len(chosen))
        source, local = self.source_in(n, chosen), self.local_size
        try:
            loaded = source.batch(indices[self.process_index * local : (self.process_index + 1) * local])
        except OSError as error:
            what = f"{error.filename or 'config.data.dir'}: cannot be read any more ({error.strerror or error})"
            raise DataLost(f"{what}; check the file and the disk it is on") from error
        check_arrays(loaded, source.spec, local)
        skipped = list(loaded.get("skipped", ()))
        return {key: loaded[key] for key in source.spec} | ({"skipped": skipped} if skipped else {})

    def source_in(self, n: int, chosen: Any = None) -> Source:
        """Returns what batch n is read of: elements in their bucket, or cropped as in its epoch."""
        source = self.source if isinstance(self.source, Source) else self.source(chosen)
        if isinstance(source, Bucketed) and chosen is not None:  # every process has the bucket of the whole batch
            source = source.in_bucket(int(source.buckets[chosen].max()))
        if isinstance(source, Cropping) and self.crops:
            source = source.cropped(self.crops, self.seed, n // self.steps_per_epoch)
        return source
