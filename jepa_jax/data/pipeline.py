"""From a source to batches on the device: who loads them, and how they are laid out."""

import atexit
import functools
import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any, TypedDict

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jepa_jax.base.errors import DataLost, UserError
from jepa_jax.config.augment import Crops
from jepa_jax.config.groups import DataConfig
from jepa_jax.data.batch_plan import BatchLoader, BatchPlan, loaded_batches
from jepa_jax.data.contract import Bucketed, Cropping, Source, Spec, element_bytes
from jepa_jax.data.workers import WorkerPool
from jepa_jax.runtime.allocator import return_freed_memory

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.1  # between two looks at whether to go on waiting for a batch
JOIN_SECONDS = 5.0  # for the prefetch thread to end; one that hangs in a read is left behind
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


class TrainBatches(Iterator[Delivery]):
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

    def __enter__(self) -> "TrainBatches":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def check_pipeline(
    data: DataConfig, source: Source, sharding: NamedSharding, crops: Mapping[str, Crops] | None = None
) -> None:
    """Raises UserError if the set does not fit on the device, or if the loader cannot crop its images."""
    if data.pipeline == "device":
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
    process_index: int = 0,
    process_count: int = 1,
    crops: Mapping[str, Crops] | None = None,
    warn: Callable[[str], object] = logger.warning,
) -> TrainBatches:
    """Returns an endless iterator of (batch, info) from step `start_step` on.

    A batch has the keys of `source.spec`; its arrays [B, ...] are laid out by `sharding`, with B the global batch size.
    Batches of a Bucketed source have the size of their bucket, or that of `spec` if the set stays on the device.
    Several processes load disjoint slices of the same global batch; the mesh must order its devices by process.
    With `crops` (`config.loader_crops`), a batch has crops of full photographs instead of "image".
    `warn` is called, from a thread, with what happened to a worker.

    Iterating raises DataLost if a file can no longer be read, or if workers keep dying or getting stuck.
    """
    plan = BatchPlan(len(source), data.batch_size, seed, source.buckets if isinstance(source, Bucketed) else None)
    check_pipeline(data, source, sharding, crops)
    if data.pipeline == "device":
        return TrainBatches(_device_batches(plan, source, sharding, start_step))
    loader = BatchLoader(plan, source, process_index, process_count, crops or {})
    return TrainBatches(_grain_batches(loader, data, sharding, start_step, warn))


def bucket_specs(data: DataConfig, source: Source) -> list[Spec]:
    """Returns the specs of the elements of all batches that `train_batches` may yield: one, or one per bucket."""
    if data.pipeline == "device" or not isinstance(source, Bucketed):
        return [source.spec]
    return [source.in_bucket(int(bucket)).spec for bucket in np.unique(source.buckets)]


# --- grain: whole batches, loaded in worker processes if asked for, prefetched by a thread ---


def _grain_batches(
    loader: BatchLoader, data: DataConfig, sharding: NamedSharding, start_step: int, warn: Callable[[str], object]
) -> Generator[Delivery | None, None, None]:
    start = time.perf_counter()
    elements, close = loaded_batches(loader, start_step), lambda: None
    if data.workers:
        pool = WorkerPool(loader, start_step, data.workers, timeout=data.worker_timeout, warn=warn)
        elements, close = pool, pool.close
    ahead = _Prefetcher(elements, functools.partial(_to_device, sharding), data.prefetch, close)
    try:
        while True:
            delivery = ahead.get()
            if delivery is None:
                yield None
                continue
            delivery[1]["wait_seconds"] = time.perf_counter() - start
            yield delivery
            start = time.perf_counter()
    finally:
        ahead.close()


def _to_device(sharding: NamedSharding, element: dict[str, Any], supplied: float) -> Delivery:
    start = time.perf_counter()
    batch = {key: jax.make_array_from_process_local_data(sharding, value) for key, value in element["batch"].items()}
    jax.block_until_ready(batch)  # a copy to a GPU goes on after the call; this thread has time to wait for it
    return batch, BatchInfo(
        generation_seconds=float(element["seconds"]),
        supply_seconds=supplied,
        transfer_seconds=time.perf_counter() - start,
        wait_seconds=0.0,
        skipped=element["skipped"],
    )


class _Prefetcher:
    """Keeps up to `depth` results of `transform(element, seconds waited for it)` ready, in order, in a thread.

    `close_elements` ends a `next(elements)` that waits.
    """

    def __init__(
        self,
        elements: Iterator[Any],
        transform: Callable[[Any, float], Delivery],
        depth: int,
        close_elements: Callable[[], None],
    ):
        self._elements, self._transform, self._close_elements = elements, transform, close_elements
        self._ready: queue.Queue[Delivery | BaseException] = queue.Queue(maxsize=depth)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="batch-prefetch", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # a thread still transferring while the interpreter shuts down can crash it

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                start = time.perf_counter()
                element = next(self._elements)
                self._put(self._transform(element, time.perf_counter() - start))
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
        self._close_elements()
        self._thread.join(JOIN_SECONDS)


# --- device: the whole set stays on the accelerator, a batch is one jitted gather ---


def _device_batches(
    plan: BatchPlan, source: Source, sharding: NamedSharding, start_step: int
) -> Generator[Delivery | None, None, None]:
    start = time.perf_counter()
    everywhere = NamedSharding(sharding.mesh, PartitionSpec())
    host, skipped = _read_all(source)
    loaded = time.perf_counter()
    resident = {key: jax.make_array_from_process_local_data(everywhere, value) for key, value in host.items()}
    jax.block_until_ready(resident)
    del host
    return_freed_memory()
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

    Those are the prefetched ones, the one that waits to follow them, and two per worker process: one in the memory
    that it shares, one in its hands.
    """
    return 0 if data.pipeline == "device" else data.prefetch + 1 + 2 * data.workers
