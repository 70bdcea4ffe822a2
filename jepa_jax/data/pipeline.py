"""From a source to batches on the device: which samples form batch n, who loads them, and how they are laid out.

The samples of batch n are a pure function of (seed, n). So the position of a run is one number, every pipeline and any
number of workers give the same batches, and a run resumes exactly by starting at its step.
"""

import atexit
import dataclasses
import functools
import itertools
import multiprocessing
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any, TypedDict

import grain
import jax
import numpy as np
from absl import flags
from jax.sharding import NamedSharding, PartitionSpec

from jepa_jax.base.errors import UserError
from jepa_jax.config.groups import DataConfig
from jepa_jax.data.contract import Bucketed, Source, Spec, element_bytes

LAST_STEP = 1 << 40  # the stream has no end; the loop decides when to stop
DEVICE_SET_FRACTION = 0.5  # of an accelerator's memory that the resident data set may take
LOAD_CHUNK = 4096  # elements read at once when filling the device

DeviceBatch = dict[str, jax.Array]


class BatchInfo(TypedDict):
    """How one batch was supplied; times in seconds."""

    generation_seconds: float  # making the batch, in whichever process
    supply_seconds: float  # the prefetch thread's wait for it
    transfer_seconds: float  # copying it to the device
    wait_seconds: float  # the caller's wait
    skipped: list[str]  # names of unreadable files


Delivery = tuple[DeviceBatch, BatchInfo]


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


class TrainBatches(Iterator[Delivery]):
    """An endless iterator that starts its threads and processes with the first batch, and ends them when closed."""

    def __init__(self, deliveries: Generator[Delivery, None, None]):
        self._deliveries = deliveries

    def __next__(self) -> Delivery:
        return next(self._deliveries)

    def close(self) -> None:
        self._deliveries.close()

    def __enter__(self) -> "TrainBatches":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def train_batches(
    data: DataConfig,
    source: Source,
    *,
    seed: int,
    sharding: NamedSharding,
    start_step: int = 0,
    process_index: int = 0,
    process_count: int = 1,
) -> TrainBatches:
    """Returns an endless iterator of (batch, info) from step `start_step` on.

    A batch has the keys of `source.spec`; its arrays [B, ...] are laid out by `sharding`, with B the global batch size.
    Batches of a Bucketed source have the size of their bucket, or that of `spec` if the set stays on the device.
    Several processes load disjoint slices of the same global batch; the mesh must order its devices by process.
    """
    plan = BatchPlan(len(source), data.batch_size, seed, source.buckets if isinstance(source, Bucketed) else None)
    if data.pipeline == "device":
        _check_room(len(source) * element_bytes(source.spec), sharding)
        return TrainBatches(_device_batches(plan, source, sharding, start_step))
    loader = BatchLoader(plan, source, process_index, process_count)
    return TrainBatches(_grain_batches(loader, sharding, start_step, data.num_workers, data.prefetch))


def bucket_specs(data: DataConfig, source: Source) -> list[Spec]:
    """Returns the specs of the elements of all batches that `train_batches` may yield: one, or one per bucket."""
    if data.pipeline == "device" or not isinstance(source, Bucketed):
        return [source.spec]
    return [source.in_bucket(int(bucket)).spec for bucket in np.unique(source.buckets)]


# --- grain: whole batches, loaded in worker processes if asked for, prefetched by a thread ---


@dataclasses.dataclass(frozen=True)
class BatchLoader:
    """Loads this process's part of batch n, with the seconds it took; runs inside Grain's workers."""

    plan: BatchPlan
    source: Source
    process_index: int = 0
    process_count: int = 1

    def __call__(self, step: int) -> dict[str, Any]:
        start = time.perf_counter()
        local = self.plan.batch_size // self.process_count
        indices, source = self.plan.indices(step), self.source
        if isinstance(source, Bucketed):  # the bucket of the whole batch: every process has the same shapes
            source = source.in_bucket(int(source.buckets[indices].max()))
        loaded = source.batch(indices[self.process_index * local : (self.process_index + 1) * local])
        return {
            "batch": {key: loaded[key] for key in self.source.spec},
            # One string: a list would be taken apart as a tree on its way out of a worker.
            "skipped": "\n".join(loaded.get("skipped", ())),
            "seconds": time.perf_counter() - start,
        }


def _grain_batches(
    loader: BatchLoader, sharding: NamedSharding, start_step: int, num_workers: int, prefetch: int
) -> Generator[Delivery, None, None]:
    start = time.perf_counter()
    to_device = functools.partial(_to_device, sharding, num_workers > 0)
    ahead = _Prefetcher(_host_batches(loader, start_step, num_workers), to_device, prefetch)
    try:
        while True:
            batch, info = ahead.get()
            info["wait_seconds"] = time.perf_counter() - start
            yield batch, info
            start = time.perf_counter()
    finally:
        ahead.close()


def _host_batches(loader: BatchLoader, start_step: int, num_workers: int) -> Any:
    steps = grain.MapDataset.range(start_step, LAST_STEP).map(loader)
    # No reader threads of Grain's: the prefetch thread is one, and a source that decodes has its own.
    batches = steps.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
    if num_workers:
        if not flags.FLAGS.is_parsed():  # Grain hands absl's flags to its workers; a notebook never parses them
            flags.FLAGS.mark_as_parsed()
        batches = batches.mp_prefetch(grain.MultiprocessingOptions(num_workers), worker_init_fn=start_worker)
    return iter(batches)


def _to_device(sharding: NamedSharding, from_worker: bool, element: dict[str, Any], supplied: float) -> Delivery:
    start = time.perf_counter()
    # The arrays of a worker live in shared memory, which must not outlive it under a jax.Array: copy them.
    host = {key: np.array(value) if from_worker else value for key, value in element["batch"].items()}
    batch = {key: jax.make_array_from_process_local_data(sharding, value) for key, value in host.items()}
    return batch, BatchInfo(
        generation_seconds=float(element["seconds"]),
        supply_seconds=supplied,
        transfer_seconds=time.perf_counter() - start,
        wait_seconds=0.0,
        skipped=element["skipped"].split("\n") if element["skipped"] else [],
    )


def start_worker(index: int, count: int) -> None:
    """Prepares a worker process: it ignores signals, which are for the main process, and exits when that one does."""
    for signum in (signal.SIGINT, signal.SIGTERM):  # a scheduler sends SIGTERM to all of them at once
        signal.signal(signum, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, name="exit-with-parent", daemon=True).start()


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None  # a worker has one
    parent.join()
    os._exit(1)


class _Prefetcher:
    """Keeps up to `depth` results of `transform(element, seconds waited for it)` ready, in order, in a thread."""

    def __init__(self, iterator: Any, transform: Callable[[Any, float], Delivery], depth: int):
        self._iterator, self._transform = iterator, transform
        self._ready: queue.Queue[Delivery | BaseException] = queue.Queue(maxsize=depth)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="batch-prefetch", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # a thread still transferring while the interpreter shuts down can crash it

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                start = time.perf_counter()
                element = next(self._iterator)
                self._put(self._transform(element, time.perf_counter() - start))
        except BaseException as error:  # raised again in the thread that asks for the batch
            self._put(error)

    def _put(self, item: Delivery | BaseException) -> None:
        while not self._stop.is_set():
            try:
                return self._ready.put(item, timeout=0.1)
            except queue.Full:
                continue

    def get(self) -> Delivery:
        item = self._ready.get()
        if isinstance(item, BaseException):
            raise item
        return item

    def close(self) -> None:
        atexit.unregister(self.close)
        self._stop.set()
        self._thread.join()
        self._iterator.close()


# --- device: the whole set stays on the accelerator, a batch is one jitted gather ---


def _device_batches(
    plan: BatchPlan, source: Source, sharding: NamedSharding, start_step: int
) -> Generator[Delivery, None, None]:
    start = time.perf_counter()
    everywhere = NamedSharding(sharding.mesh, PartitionSpec())
    host, skipped = _read_all(source)
    loaded = time.perf_counter()
    resident = {key: jax.make_array_from_process_local_data(everywhere, value) for key, value in host.items()}
    del host
    gather = jax.jit(_take, out_shardings=dict.fromkeys(resident, sharding))
    # The first batch reports the reading of the set; the others cost nothing.
    read, copied = loaded - start, time.perf_counter() - loaded
    for step in itertools.count(start_step):
        indices = jax.make_array_from_process_local_data(everywhere, plan.indices(step).astype(np.int32))
        batch = gather(resident, indices)
        yield (
            batch,
            BatchInfo(
                generation_seconds=read,
                supply_seconds=read,
                transfer_seconds=copied,
                wait_seconds=time.perf_counter() - start,
                skipped=skipped,
            ),
        )
        start, read, copied, skipped = time.perf_counter(), 0.0, 0.0, []


def _read_all(source: Source) -> tuple[dict[str, np.ndarray], list[str]]:
    """Reads a whole split in chunks; returns its arrays and the names of unreadable files."""
    n, skipped = len(source), []
    arrays = {key: np.empty((n, *one.shape), one.dtype) for key, one in source.spec.items()}
    for first in range(0, n, LOAD_CHUNK):
        part = source.batch(np.arange(first, min(first + LOAD_CHUNK, n)))
        for key, array in arrays.items():
            array[first : first + LOAD_CHUNK] = part[key]
        skipped += part.get("skipped", ())
    return arrays, skipped


def _take(resident: DeviceBatch, indices: jax.Array) -> DeviceBatch:
    return {key: values.at[indices].get(mode="promise_in_bounds") for key, values in resident.items()}


def _check_room(num_bytes: int, sharding: NamedSharding) -> None:
    """Raises UserError if the set would take too much of the device's memory."""
    device: Any = next(iter(sharding.addressable_devices))
    limit = (device.memory_stats() or {}).get("bytes_limit")  # unknown on CPU
    if limit and num_bytes > DEVICE_SET_FRACTION * limit:
        gib = f"{num_bytes / 2**30:.1f} of the device's {limit / 2**30:.1f} GiB"
        raise UserError(f"config.data.pipeline = device: the set takes {gib}; use config.data.pipeline = grain")


# --- evaluation ---


def eval_batches(
    source: Source, batch_size: int, sharding: NamedSharding, *, process_index: int = 0, process_count: int = 1
) -> Iterator[tuple[DeviceBatch, int]]:
    """Yields every sample once, in order, as (batch, number valid); the last batch wraps round to full size."""
    n, local = len(source), batch_size // process_count
    for first in range(0, n, batch_size):
        own = first + process_index * local
        part = source.batch(np.arange(own, own + local) % n)
        batch = {key: jax.make_array_from_process_local_data(sharding, part[key]) for key in source.spec}
        yield batch, min(batch_size, n - first)


def batches_ready(data: DataConfig) -> int:
    """Returns the most batches that a loader may have made before anyone asked for them.

    Those are the prefetched ones, the one that waits to follow them, and four per worker process of Grain's: in its
    hands, in its queue, in the hands of the thread that reads it, and in that thread's queue.
    """
    return 0 if data.pipeline == "device" else data.prefetch + 1 + 4 * data.num_workers
