"""From a source to batches on the device: who loads them, and how they are laid out."""

import atexit
import contextlib
import copy
import functools
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any, NotRequired, TypedDict

import grain
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jepa_jax.base.errors import DataLost, UserError
from jepa_jax.config.augment import Crops
from jepa_jax.config.groups import DataConfig
from jepa_jax.data.batches import SampleOrder, batch_dataset
from jepa_jax.data.contract import Bucketed, Cropping, Source, Spec, abstract_batch, element_bytes
from jepa_jax.data.elements import StreamSource
from jepa_jax.data.reading import took_too_long
from jepa_jax.data.workers import PoolIterator, State, SupervisedPool, read_options
from jepa_jax.runtime.allocator import return_freed_memory
from jepa_jax.runtime.mesh import batch_sharding, make_mesh

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.1  # between two looks at whether to go on waiting for a batch
JOIN_SECONDS = 3.0  # for the prefetch thread to end; one that hangs in a read is left behind
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
    state: NotRequired[State]  # position of the data after it, to go on from


Delivery = tuple[DeviceBatch, BatchInfo]


class TrainBatches(Iterator[Delivery], contextlib.AbstractContextManager):
    """An endless iterator that starts its threads and processes with the first batch, and ends them when closed."""

    def __init__(self, deliveries: Generator[Delivery | None, None, None]):
        """`deliveries` yields None from time to time while no batch is ready."""
        self._deliveries = deliveries

    def __next__(self) -> Delivery:
        return self.wait(lambda: None)

    def wait(self, check: Callable[[], object]) -> Delivery:
        """Returns the next batch; calls `check`, which may raise, again and again while there is none."""
        while (delivery := next(self._deliveries)) is None:
            check()
        return delivery

    def close(self) -> None:
        self._deliveries.close()

    def __exit__(self, *error: object) -> None:
        self.close()


def check_pipeline(
    data: DataConfig, source: Source, sharding: NamedSharding, crops: Mapping[str, Crops] | None = None
) -> None:
    """Raises UserError if the set does not fit on the device, or if the loader cannot crop its images."""
    if data.pipeline == "device":
        if isinstance(source, StreamSource):
            raise UserError("config.data.pipeline = device: a stream cannot stay on the device; use grain")
        _check_room(len(source) * element_bytes(source.spec), sharding)
    elif crops and not isinstance(source, Cropping):
        raise UserError(
            f"config.data.crops = loader: {data.source} delivers images of one size, not photographs; use data.crops = "
            "device"
        )


def train_batches(
    data: DataConfig,
    source: Source,
    *,
    seed: int,
    sharding: NamedSharding,
    start_step: int = 0,
    state: State = None,
    crops: Mapping[str, Crops] | None = None,
    warn: Callable[[str], object] = logger.warning,
) -> TrainBatches:
    """Returns the batches of a source as a config loads them, from step `start_step` on; a stream goes on from `state`.

    Batches of a Bucketed source have the size of their bucket, or that of `spec` if the set stays on the device.
    Several processes load disjoint slices of the same global batch; the mesh must order its devices by process.
    """
    check_pipeline(data, source, sharding, crops)
    if data.pipeline == "device":
        order = SampleOrder(
            len(source), data.batch_size, seed, source.buckets if isinstance(source, Bucketed) else None
        )
        return TrainBatches(_gathered(order, source, sharding, start_step))
    place = {"process_index": jax.process_index(), "process_count": jax.process_count()}
    dataset = batch_dataset(source, data.batch_size, seed=seed, crops=crops, **place)
    return load_batches(
        dataset,
        sharding=sharding,
        start=state if isinstance(dataset, grain.IterDataset) else start_step,
        num_workers=data.workers,
        worker_threads=data.worker_threads,
        worker_timeout=data.worker_timeout,
        prefetch=data.prefetch,
        warn=warn,
    )


def bucket_specs(data: DataConfig, source: Source) -> list[Spec]:
    """Returns the specs of the elements of all batches that `train_batches` may yield: one, or one per bucket."""
    if data.pipeline == "device" or not isinstance(source, Bucketed):
        return [source.spec]
    return [source.in_bucket(int(bucket)).spec for bucket in np.unique(source.buckets)]


def abstract_on(mesh: Mesh, spec: Spec, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes of a batch with the layout that training gives it."""
    layout = batch_sharding(mesh)
    shapes = abstract_batch(spec, batch_size)
    return {key: jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=layout) for key, one in shapes.items()}


# --- grain: whole batches, loaded in worker processes if asked for, prefetched by a thread ---


def load_batches(
    dataset: grain.MapDataset | grain.IterDataset,
    *,
    sharding: NamedSharding | None = None,
    start: int | State = 0,
    num_workers: int = 0,
    worker_threads: int = 1,
    worker_timeout: float = 300.0,
    prefetch: int = 2,
    warn: Callable[[str], object] = logger.warning,
) -> TrainBatches:
    """Returns an iterator of (batch, info) over the elements of a Grain dataset, laid out on the device ahead of time.

    Iterating raises DataLost if a file can no longer be read, or if workers keep dying or getting stuck.

    Args:
      dataset: its elements are this process's parts of batches, dicts of arrays [B, ...].
      sharding: how the arrays of the whole batch are laid out; by default over all devices.
      start: number of the first element, of a dataset with random access; or the `state` of the info to go on from.
      num_workers: processes that make the elements (`SupervisedPool`); 0 makes them in a thread.
      worker_threads: elements that each of them makes at once, if there is random access.
      worker_timeout: seconds without an element after which workers are restarted; without workers, DataLost is raised.
      prefetch: batches kept ready on the device.
      warn: called, from a thread, with what happened to a worker.
    """
    if num_workers:
        how: Any = {"threads": worker_threads, "timeout": worker_timeout, "warn": warn}
        elements: grain.IterDataset = SupervisedPool(dataset, num_workers, **how)
    elif isinstance(dataset, grain.MapDataset):
        # No reader threads of Grain's: the prefetch thread is one, and a source that decodes has its own.
        elements = dataset.to_iter_dataset(read_options(1))
    else:
        elements = dataset
    sharding = sharding or batch_sharding(make_mesh(jax.device_count(), 1))
    state: State = None
    if not isinstance(start, int):
        state = start
    elif isinstance(dataset, grain.MapDataset):
        state = {"next_index": start}
    elif start:
        raise UserError(f"start = {start}: a stream has no numbers; give the `state` of an info to go on from")
    limit = math.inf if num_workers else worker_timeout  # the pool has its own
    return TrainBatches(_loaded(elements, sharding, state, prefetch, limit))


def _loaded(
    elements: grain.IterDataset, sharding: NamedSharding, state: State, prefetch: int, limit: float
) -> Generator[Delivery | None, None, None]:
    start, waited = time.perf_counter(), 0.0
    iterator = iter(elements)
    if state is not None:
        iterator.set_state(state)
    ahead = _Prefetcher(iterator, functools.partial(_to_device, sharding), prefetch)
    try:
        while True:
            if (delivery := ahead.get()) is None:
                waited += POLL_SECONDS  # while this process runs: Ctrl-Z stops it
                if waited > limit:
                    raise took_too_long(limit)
                yield None
                continue
            delivery[1]["wait_seconds"] = time.perf_counter() - start
            yield delivery
            start, waited = time.perf_counter(), 0.0
    except StopIteration:
        return  # the dataset has an end
    finally:
        ahead.close()


def _to_device(sharding: NamedSharding, iterator: grain.DatasetIterator) -> Delivery:
    start = time.perf_counter()
    element = next(iterator)
    supplied = time.perf_counter()
    skipped = element.get("skipped", [])
    arrays = {key: value for key, value in element.items() if key != "skipped"}
    batch = {key: jax.make_array_from_process_local_data(sharding, value) for key, value in arrays.items()}
    jax.block_until_ready(batch)  # a copy to a GPU goes on after the call; this thread has time to wait for it
    return batch, BatchInfo(
        generation_seconds=iterator.seconds if isinstance(iterator, PoolIterator) else supplied - start,
        supply_seconds=supplied - start,
        transfer_seconds=time.perf_counter() - supplied,
        wait_seconds=0.0,
        skipped=skipped,
        state=copy.deepcopy(iterator.get_state()),
    )


class _Prefetcher:
    """Keeps up to `depth` results of `take(iterator)` ready, in order, in a thread.

    Grain's own prefetch thread cannot be asked whether an element is ready, nor be left behind in a read that hangs.
    """

    def __init__(self, iterator: grain.DatasetIterator, take: Callable[[grain.DatasetIterator], Delivery], depth: int):
        self._iterator, self._take = iterator, take
        self._ready: queue.Queue[Delivery | BaseException] = queue.Queue(maxsize=depth)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="batch-prefetch", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # a thread still transferring while the interpreter shuts down can crash it

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._put(self._take(self._iterator))
        except BaseException as error:  # raised again in the thread that asks for the batch
            self._put(error)

    def _put(self, item: Delivery | BaseException) -> None:
        while not self._stop.is_set():
            try:
                return self._ready.put(item, timeout=0.1)
            except queue.Full:
                continue

    def get(self) -> Delivery | None:
        """Returns the next result, or None if there is none yet."""
        try:
            item = self._ready.get(timeout=POLL_SECONDS)
        except queue.Empty:
            return None
        if isinstance(item, UserError) and not isinstance(item, DataLost):
            raise DataLost(str(item)) from item  # it comes in mid-run
        if isinstance(item, BaseException):
            raise item
        return item

    def close(self) -> None:
        atexit.unregister(self.close)
        self._stop.set()
        self._iterator.close()
        self._thread.join(JOIN_SECONDS)


# --- device: the whole set stays on the accelerator, a batch is one jitted gather ---


def _gathered(
    order: grain.MapDataset, source: Source, sharding: NamedSharding, start_step: int
) -> Generator[Delivery | None, None, None]:
    """Yields the batches that `batch_dataset` has."""
    start = time.perf_counter()
    numbers = iter(order.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)))
    numbers.set_state({"next_index": start_step})
    everywhere = NamedSharding(sharding.mesh, PartitionSpec())
    host, skipped = _read_all(source)
    loaded = time.perf_counter()
    resident = {key: jax.make_array_from_process_local_data(everywhere, value) for key, value in host.items()}
    jax.block_until_ready(resident)
    del host
    return_freed_memory()
    gather = jax.jit(
        lambda resident, indices: {
            key: values.at[indices].get(mode="promise_in_bounds") for key, values in resident.items()
        },
        out_shardings=dict.fromkeys(resident, sharding),
    )
    # The first batch reports the reading of the set; the others cost nothing.
    read, copied = loaded - start, time.perf_counter() - loaded
    for chosen in numbers:
        indices = jax.make_array_from_process_local_data(everywhere, chosen.astype(np.int32))
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


def _check_room(num_bytes: int, sharding: NamedSharding) -> None:
    device: Any = next(iter(sharding.addressable_devices))
    limit = (device.memory_stats() or {}).get("bytes_limit")  # unknown on CPU
    if limit and num_bytes > DEVICE_SET_FRACTION * limit:
        gib = f"{num_bytes / 2**30:.1f} of the device's {limit / 2**30:.1f} GiB"
        raise UserError(f"config.data.pipeline = device: the set takes {gib}; use config.data.pipeline = grain")


# --- evaluation ---


def eval_batches(source: Source, batch_size: int, sharding: NamedSharding) -> Iterator[tuple[DeviceBatch, int]]:
    """Yields every sample once, in order, as (batch, number valid); the last batch wraps round to full size."""
    n, local = len(source), batch_size // jax.process_count()
    for first in range(0, n, batch_size):
        own = first + jax.process_index() * local
        part = source.batch(np.arange(own, own + local) % n)
        batch = {key: jax.make_array_from_process_local_data(sharding, part[key]) for key in source.spec}
        yield batch, min(batch_size, n - first)


def batches_ready(data: DataConfig) -> int:
    """Returns the most batches that a loader may have made before anyone asked for them.

    Those are the prefetched ones, the one that waits to follow them, two per worker process (one in the memory that it
    shares, one in its hands), and what its threads make at once.
    """
    each = 2 + (data.worker_threads if data.worker_threads > 1 else 0)
    return 0 if data.pipeline == "device" else data.prefetch + 1 + data.workers * each
