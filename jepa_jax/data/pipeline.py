"""From a source to batches on the device: which samples make step n, who loads them, and how they are laid out.

The samples of step n are a pure function of (seed, n), so the position of a run is one number, every pipeline and any
number of workers give the same batches, and resuming is exact.
"""

import atexit
import dataclasses
import functools
import math
import multiprocessing
import os
import queue
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import grain
import jax
import numpy as np
from absl import flags

from jepa_jax.base.errors import UserError
from jepa_jax.data.sources import Source

PIPELINES = ("grain", "device")
LAST_STEP = 1 << 40  # the stream has no end; the loop decides when to stop
DEVICE_SET_FRACTION = 0.5  # of an accelerator's memory that the resident data set may take
LOAD_CHUNK = 4096  # images read at once when filling the device


@dataclasses.dataclass(frozen=True)
class BatchPlan:
    """Which samples make batch n: a fresh permutation each epoch, the incomplete last batch dropped."""

    num_samples: int
    batch_size: int
    seed: int

    def __post_init__(self):
        if self.batch_size < 1:
            raise UserError(f"data.batch_size = {self.batch_size}: must be at least 1")
        if self.batch_size > self.num_samples:
            raise UserError(
                f"data.batch_size = {self.batch_size}: the train split has {self.num_samples} images; "
                f"use data.batch_size <= {self.num_samples} or more data"
            )

    @property
    def steps_per_epoch(self) -> int:
        return self.num_samples // self.batch_size

    def indices(self, n: int) -> np.ndarray:
        """Sample numbers of batch n, int64 [batch_size]."""
        epoch, place = divmod(n, self.steps_per_epoch)
        order = _permutation(self.num_samples, self.seed, epoch)
        return order[place * self.batch_size : (place + 1) * self.batch_size]


@functools.lru_cache(maxsize=2)  # two, for threads on both sides of an epoch's end
def _permutation(num_samples: int, seed: int, epoch: int) -> np.ndarray:
    order = np.random.default_rng([seed % 2**63, epoch]).permutation(num_samples)
    order.setflags(write=False)
    return order


def train_batches(
    data_config: Any,
    source: Source,
    *,
    seed: int,
    sharding: jax.sharding.NamedSharding,
    start_step: int = 0,
    process_index: int = 0,
    process_count: int = 1,
) -> "TrainBatches":
    """An endless iterator of (batch, info) from step `start_step` on.

    batch: {"image": uint8 [B, H, W, 3], "label": int32 [B]} laid out by `sharding`, with B the global batch size.
    info: {"generation_seconds", "supply_seconds", "transfer_seconds", "wait_seconds": float, "skipped": list of paths}:
    what making the batch took in whichever process, what the prefetch thread waited for it and took to copy it to the
    device, and what the caller waited.

    Several processes load disjoint slices of the same global batch; the mesh must order its devices by process.
    """
    if data_config.pipeline not in PIPELINES:
        raise UserError(f"data.pipeline = {data_config.pipeline}: unknown; use one of {', '.join(PIPELINES)}")
    for key, least in (("num_workers", 0), ("prefetch", 1)):
        if getattr(data_config, key) < least:
            raise UserError(f"data.{key} = {getattr(data_config, key)}: must be at least {least}")
    plan = BatchPlan(len(source), data_config.batch_size, seed)
    _require_divisible("data.batch_size", plan.batch_size, sharding, process_count)
    if data_config.pipeline == "device":
        return DeviceBatches(plan, source, sharding, start_step)
    loader = BatchLoader(plan, source, process_index, process_count)
    return GrainBatches(loader, sharding, start_step, data_config.num_workers, data_config.prefetch)


def _require_divisible(key: str, batch_size: int, sharding: jax.sharding.NamedSharding, process_count: int) -> None:
    axes = sharding.spec[0] if len(sharding.spec) else None  # the mesh axes that the batch is spread over
    names = (axes,) if isinstance(axes, str) else axes or ()
    devices = math.prod(sharding.mesh.shape[name] for name in names)
    for parts, what in ((process_count, "processes"), (devices, "devices")):
        if batch_size % parts:
            raise UserError(f"{key} = {batch_size}: not divisible by {parts} {what}; use a multiple of {parts}")


class TrainBatches:
    """What both pipelines offer: an iterator whose whole state is the number of the next step."""

    def __init__(self, start_step: int):
        self._step = start_step

    def __iter__(self):
        return self

    def __next__(self) -> tuple[dict[str, jax.Array], dict[str, Any]]:
        raise NotImplementedError

    def get_state(self) -> int:
        return self._step

    def set_state(self, step: int) -> None:
        self._step = int(step)

    def close(self) -> None:
        """Ends threads and worker processes; the iterator may be used again and then starts new ones."""

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()


@dataclasses.dataclass(frozen=True)
class BatchLoader:
    """Step number to this process's part of the batch, with the seconds it took; runs inside Grain's workers."""

    plan: BatchPlan
    source: Source
    process_index: int = 0
    process_count: int = 1

    def __call__(self, step: int) -> dict[str, Any]:
        start = time.perf_counter()
        local = self.plan.batch_size // self.process_count
        indices = self.plan.indices(step)[self.process_index * local : (self.process_index + 1) * local]
        batch = self.source.batch(indices)
        # One string: a list would be taken apart as a tree on its way out of a worker.
        return {**batch, "skipped": "\n".join(batch.get("skipped", ())), "seconds": time.perf_counter() - start}


class GrainBatches(TrainBatches):
    """Grain loads whole batches (in worker processes if asked); a thread keeps `prefetch` of them on the device."""

    def __init__(self, loader: BatchLoader, sharding, start_step: int, num_workers: int, prefetch: int):
        super().__init__(start_step)
        self._loader, self._sharding = loader, sharding
        self._num_workers, self._prefetch = num_workers, prefetch
        self._ahead: _Prefetcher | None = None

    def __next__(self):
        start = time.perf_counter()
        if self._ahead is None:  # on first use, so that set_state on resume starts no worker twice
            self._ahead = _Prefetcher(self._host_iterator(), self._to_device, self._prefetch)
        batch, info = self._ahead.get()
        self._step += 1
        return batch, {**info, "wait_seconds": time.perf_counter() - start}

    def set_state(self, step: int) -> None:
        self.close()
        super().set_state(step)

    def close(self) -> None:
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None

    def _host_iterator(self):
        steps = grain.MapDataset.range(self._step, LAST_STEP).map(self._loader)
        # No reader threads of Grain's: the prefetch thread is one, and a source that decodes has its own.
        batches = steps.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
        if self._num_workers:
            if not flags.FLAGS.is_parsed():  # Grain hands absl's flags to its workers; a notebook never parses them
                flags.FLAGS.mark_as_parsed()
            options = grain.MultiprocessingOptions(num_workers=self._num_workers)
            batches = batches.mp_prefetch(options, worker_init_fn=start_worker)
        return iter(batches)

    def _to_device(self, element):
        start = time.perf_counter()
        # A copy, as the arrays of a worker live in shared memory, which must not outlive it under a jax.Array.
        host = {key: np.array(element[key]) if self._num_workers else element[key] for key in ("image", "label")}
        batch = {key: jax.make_array_from_process_local_data(self._sharding, value) for key, value in host.items()}
        return batch, {
            "generation_seconds": float(element["seconds"]),
            "transfer_seconds": time.perf_counter() - start,
            "skipped": element["skipped"].split("\n") if element["skipped"] else [],
        }


def start_worker(index: int, count: int) -> None:
    """Runs first in each worker: signals are for the main process, which no worker outlives, even after kill -9."""
    for signum in (signal.SIGINT, signal.SIGTERM):  # a scheduler sends SIGTERM to all of them at once
        signal.signal(signum, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, name="exit-with-parent", daemon=True).start()


def _exit_with_parent():
    parent = multiprocessing.parent_process()
    assert parent is not None  # a worker has one
    parent.join()
    os._exit(1)


class _Prefetcher:
    """A thread that pulls from `iterator` and keeps up to `depth` results of `transform` ready, in order."""

    def __init__(self, iterator, transform, depth: int):
        self._iterator = iterator
        self._ready: queue.Queue = queue.Queue(maxsize=depth)
        self._stop = threading.Event()
        self._failed: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(transform,), name="batch-prefetch", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # a thread still transferring while the interpreter shuts down can crash it

    def _run(self, transform):
        try:
            while not self._stop.is_set():
                start = time.perf_counter()
                element = next(self._iterator)
                supplied = time.perf_counter() - start
                batch, info = transform(element)
                self._put(((batch, {**info, "supply_seconds": supplied}), None))
        except BaseException as error:  # carried over to the thread that asks for the batch
            self._put((None, error))

    def _put(self, item):
        while not self._stop.is_set():
            try:
                return self._ready.put(item, timeout=0.1)
            except queue.Full:
                continue

    def get(self):
        if self._failed is not None:
            raise self._failed
        result, self._failed = self._ready.get()
        if self._failed is not None:
            raise self._failed
        return result

    def close(self):
        atexit.unregister(self.close)
        self._stop.set()
        self._thread.join()
        self._iterator.close()


class DeviceBatches(TrainBatches):
    """The whole set stays on the accelerator as uint8; a batch is one jitted gather."""

    def __init__(self, plan: BatchPlan, source: Source, sharding, start_step: int):
        super().__init__(start_step)
        self._plan, self._source, self._sharding = plan, source, sharding
        self._everywhere = jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec())
        _require_room(len(source) * int(np.prod(source.image_shape)), sharding)
        self._gather = jax.jit(_take, out_shardings={"image": sharding, "label": sharding})
        self._data: dict[str, jax.Array] | None = None

    def __next__(self):
        start = time.perf_counter()
        info = {"generation_seconds": 0.0, "supply_seconds": 0.0, "transfer_seconds": 0.0, "skipped": []}
        if self._data is None:
            self._data = self._fill(info)
        indices = self._plan.indices(self._step).astype(np.int32)
        batch = self._gather(self._data, jax.make_array_from_process_local_data(self._everywhere, indices))
        self._step += 1
        return batch, {**info, "wait_seconds": time.perf_counter() - start}

    def close(self) -> None:
        self._data = None

    def _fill(self, info):
        """Reads the set once; the first batch's info carries the time and the skipped files."""
        start = time.perf_counter()
        n = len(self._source)
        host: dict[str, np.ndarray] = {
            "image": np.empty((n, *self._source.image_shape), np.uint8),
            "label": np.empty(n, np.int32),
        }
        for first in range(0, n, LOAD_CHUNK):
            part = self._source.batch(np.arange(first, min(first + LOAD_CHUNK, n)))
            for key in host:
                host[key][first : first + LOAD_CHUNK] = part[key]
            info["skipped"].extend(part.get("skipped", ()))
        loaded = time.perf_counter()
        data = {key: jax.make_array_from_process_local_data(self._everywhere, value) for key, value in host.items()}
        info["generation_seconds"] = info["supply_seconds"] = loaded - start
        info["transfer_seconds"] = time.perf_counter() - loaded
        return data


def _take(data, indices):
    return {key: values.at[indices].get(mode="promise_in_bounds") for key, values in data.items()}


def _require_room(num_bytes: int, sharding) -> None:
    stats = next(iter(sharding.addressable_devices)).memory_stats() or {}
    limit = stats.get("bytes_limit")  # unknown on CPU
    if limit and num_bytes > DEVICE_SET_FRACTION * limit:
        raise UserError(
            f"data.pipeline = device: the set takes {num_bytes / 2**30:.1f} of the device's {limit / 2**30:.1f} GiB; "
            "use data.pipeline = grain"
        )


def eval_batches(
    source: Source,
    batch_size: int,
    sharding: jax.sharding.NamedSharding,
    *,
    process_index: int = 0,
    process_count: int = 1,
) -> Iterator[tuple[dict[str, jax.Array], int]]:
    """Every sample once, in order, as (batch, n_valid); the last batch wraps round to full size: shapes are static."""
    _require_divisible("eval.batch_size", batch_size, sharding, process_count)
    n, local = len(source), batch_size // process_count
    for first in range(0, n, batch_size):
        own = first + process_index * local
        part = source.batch(np.arange(own, own + local) % n)
        batch = {key: jax.make_array_from_process_local_data(sharding, part[key]) for key in ("image", "label")}
        yield batch, min(batch_size, n - first)


def batches_ready(data: Any) -> int:
    """The most batches that a loader may have made before anyone asked for them.

    Those on the device and the one that waits to follow them; and of each worker process of Grain's four: in its hands,
    in its queue, in the hands of the thread that reads it, and in that one's queue.
    """
    return 0 if data.pipeline == "device" else data.prefetch + 1 + 4 * data.num_workers
