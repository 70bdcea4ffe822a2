"""Measures one combination of settings: the real training step, fed by the real loader, as the training loop runs it.

The loop dispatches step n and reads the metrics of step n - 1, as `train.py` does; a step is complete when its metrics
have been read. The clock runs from the completion of one step to that of another so many steps later, both read while
the following step is under way: neither end waits for a device that would not wait in training, and nothing is looked
at in between. What the loader had made before, while the step was compiled, is thrown away first.
"""

import collections
import contextlib
import hashlib
import itertools
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import psutil

from jepa_jax.base.errors import UserError
from jepa_jax.config.schema import validate
from jepa_jax.data.dummy import open_dummy
from jepa_jax.data.pipeline import batches_ready, train_batches
from jepa_jax.data.sources import open_source
from jepa_jax.profiling import memory_growth, monitor, peak
from jepa_jax.profiling.accounting import account
from jepa_jax.profiling.compilations import traced_flops
from jepa_jax.profiling.device_clock import DeviceClock
from jepa_jax.profiling.record import gpu_figures
from jepa_jax.profiling.timers import Segment
from jepa_jax.program.build import Program, build_program
from jepa_jax.program.step import TrainState
from jepa_jax.runtime import memory as process_memory
from jepa_jax.runtime.mesh import batch_sharding, check_batch
from jepa_jax.runtime.provenance import unused_gpu
from jepa_jax.runtime.start import setup
from jepa_jax.train.loop import INIT_IMAGES, first_images
from jepa_jax.tuning.trial import WAITS, TrialRequest, with_key

MONITOR_SECONDS = 0.5
CACHE_HIT = "/jax/compilation_cache/cache_hits"

OnStep = Callable[[dict[str, jax.Array], dict[str, jax.Array]], None]  # hears of each step's batch and metrics


def ignore(batch: Any, metrics: Any) -> None:
    """Of a loop that nobody listens to."""


class StepLoop:
    """The training loop without its bookkeeping; notes when steps were complete and when it waited for data."""

    def __init__(
        self, step: Callable, state: TrainState, batches: Iterator, device: DeviceClock, on_step: OnStep = ignore
    ):
        self._step, self._batches, self._device, self._on_step = step, batches, device, on_step
        self.state = state
        self.completed: list[float] = []
        self.finite = True
        self._waits: list[Segment] = []
        self._pending: collections.deque = collections.deque()

    def take(self, steps: int) -> None:
        for _ in range(steps):
            asked = time.perf_counter()
            batch, _ = next(self._batches)
            began = time.perf_counter()
            self._waits.append(("data_wait", asked, began))
            self.state, metrics = self._step(self.state, batch)
            self._device.dispatched(began, metrics["loss"])
            self._pending.append(metrics)
            self._read(all_but=1)
            self._on_step(batch, metrics)

    def discard(self, batches: int) -> None:
        """Takes batches from the loader and does nothing with them."""
        for _ in range(batches):
            next(self._batches)

    def drain(self) -> None:
        """Until nothing is under way."""
        self._read(all_but=0)

    def waited_for_data(self, began: float, ended: float) -> float:
        """Seconds between the two in which the device had nothing to do for want of data, as training counts them."""
        waits = [(name, max(start, began), min(end, ended)) for name, start, end in self._waits]
        busy = self._device.take(ended)
        return account([wait for wait in waits if wait[1] < wait[2]], busy).exposed.get("data_wait", 0.0)

    def _read(self, all_but: int) -> None:
        while len(self._pending) > all_but:
            values = {name: float(value) for name, value in jax.device_get(self._pending.popleft()).items()}
            self.finite = self.finite and math.isfinite(values["loss"])
            self.completed.append(time.perf_counter())


class Compiled:
    """The training step of a program compiled for a batch, with what is known from compiling it."""

    def __init__(self, program: Program, state: TrainState, batch: Any):
        hits: list[str] = []

        def listen(event: str, **_: Any) -> None:
            hits.extend([event] if event == CACHE_HIT else [])

        jax.monitoring.register_event_listener(listen)
        try:
            began = time.perf_counter()
            jitted: Any = program.train_step
            traced = jitted.trace(state, batch)
            lowered = traced.lower()
            self.call = lowered.compile()
            self.seconds = time.perf_counter() - began
        finally:
            jax.monitoring.unregister_event_listener(listen)
        self.cached = bool(hits)
        self.flops = traced_flops(traced)
        # The text holds no locations: equal programs are equal, wherever they were written down.
        self.fingerprint = hashlib.sha256(lowered.as_text().encode()).hexdigest()[:16]


def useful_flops(config: Any, state: Any, batch: Any, **shapes: Any) -> int:
    """Operations of a step that computes nothing twice: remat takes more, which is no better use of the device."""
    jitted: Any = build_program(with_key(config, "train.remat", "none"), **shapes).train_step
    return traced_flops(jitted.trace(state, batch))


def slowed(step: Callable, share: float) -> Callable:
    """A step that takes longer by `share` of its own time: the wait begins when it is complete, so nothing hides it.

    It keeps its core busy: a core that sleeps takes longer to come back than it slept, on a virtual machine.
    """

    def slow_step(*arguments: Any) -> Any:
        began = time.perf_counter()
        outputs = jax.block_until_ready(step(*arguments))
        ended = time.perf_counter()
        while time.perf_counter() < ended + share * (ended - began):
            pass
        return outputs

    return slow_step


def measure(
    request: TrialRequest, *, on_step: OnStep = ignore, before_steps: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """The figures of one repeat; `before_steps` is called when the step has been compiled."""
    config = request.configuration()
    validate(config)
    mesh = setup(config)
    if request.gpu_index is not None and jax.default_backend() != "gpu":
        raise UserError(
            f"--gpu_index = {request.gpu_index}: JAX computes on {jax.default_backend()} here; "
            "install JAX for the GPU (nvidia-smi has to list it), or leave the flag out"
        )
    if unused := unused_gpu(request.gpu_index):
        raise UserError(f"figures would be those of the CPU: {unused}")
    check_batch(config, mesh)
    open_split = open_dummy if request.use_dummy_data else open_source
    source = open_split(config.data, "train")
    sample = first_images(source, INIT_IMAGES)
    shapes: Any = {"num_train": len(source), "num_classes": len(source.classes), "sample": sample, "mesh": mesh}
    program = build_program(config, **shapes)
    state = program.factory.create(config.train.seed, sample)
    sharding = batch_sharding(mesh)
    with (
        contextlib.closing(DeviceClock()) as device,
        train_batches(config.data, source, seed=config.train.seed, sharding=sharding) as batches,
        contextlib.ExitStack() as stack,
    ):
        first = next(batches)
        compiled = Compiled(program, state, first[0])
        flops = compiled.flops if config.train.remat == "none" else useful_flops(config, state, first[0], **shapes)
        before_steps()
        process_memory.reset_peak()  # compiling may have taken more than any step will
        step = slowed(compiled.call, WAITS[request.fault]) if request.fault in WAITS else compiled.call
        loop = StepLoop(step, state, itertools.chain([first], batches), device, on_step)
        del state, first  # the loop donates the one and is done with the other soon
        loop.take(1)
        loop.drain()
        if request.with_evaluation:
            from jepa_jax.tuning.trial_evaluation import evaluation_and_checkpoint

            sources = source, open_split(config.data, "test")
            stack.enter_context(evaluation_and_checkpoint(config, program, sources, loop.state))
        figures = _measured_steps(config, request, loop)
    most, _ = peak.peak_flops(config.profile.peak_tflops, config.train.precision, mesh.size)
    limits = [(one.memory_stats() or {}).get("bytes_limit") for one in mesh.local_devices]
    return {
        **figures,
        "flops_per_batch": flops,
        "mfu": flops * figures["batches_per_sec"] / most if most else None,
        "compile_seconds": compiled.seconds,
        "compile_cached": compiled.cached,
        "program_fingerprint": compiled.fingerprint,
        "pipeline_fingerprint": pipeline_fingerprint(config.data, request.use_dummy_data),
        "data_source": "dummy" if request.use_dummy_data else config.data.source,
        "devices": f"{mesh.size} x {mesh.devices.flat[0].device_kind}",
        "platform": jax.default_backend(),
        "device_limit_bytes": min((limit for limit in limits if limit), default=None),
    }


def _measured_steps(config: Any, request: TrialRequest, loop: StepLoop) -> dict[str, Any]:
    """Warm-up, the timed steps, and more of them if memory has grown."""
    workers = psutil.Process().children(recursive=True)
    watch = monitor.Monitor(MONITOR_SECONDS)
    try:
        points = [(len(loop.completed), memory_growth.settled())]
        discarded = batches_ready(config.data)
        loop.discard(discarded)
        loop.take(request.warmup_batches + 1)  # the last of them counts already: the one before it is complete now
        began, cpu_before, system_before = loop.completed[-1], _cpu_seconds(workers), psutil.cpu_times()
        watch.start()
        loop.take(request.max_batches)  # the last of them does not count: it is under way at the end as at the start
        ended, cpu_after, system_after = loop.completed[-1], _cpu_seconds(workers), psutil.cpu_times()
        samples = watch.take()
    finally:
        watch.close()
    times = np.diff(loop.completed[-request.max_batches - 1 :])
    waited = loop.waited_for_data(began, ended)
    loop.drain()
    process_memory_bytes = process_memory.peak_bytes() + sum(_resident(worker) for worker in workers)
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in jax.local_devices()]
    points.append((len(loop.completed), memory_growth.settled()))
    if memory_growth.is_suspicious(points):
        for _ in range(memory_growth.BLOCKS):
            loop.take(max(4, request.max_batches // memory_growth.BLOCKS))
            loop.drain()
            points.append((len(loop.completed), memory_growth.settled()))
    growth = memory_growth.growth(points)
    elapsed = ended - began
    gpus = gpu_figures(samples)
    return {
        "samples_per_sec": request.max_batches * config.data.batch_size / elapsed,
        "batches_per_sec": request.max_batches / elapsed,
        "avg_step_time": elapsed / request.max_batches,
        "step_time_p50": float(np.percentile(times, 50)),
        "step_time_p95": float(np.percentile(times, 95)),
        "samples_processed": request.max_batches * config.data.batch_size,
        "measured_batches": request.max_batches,
        "warmup_batches": request.warmup_batches,
        "discarded_batches": discarded,
        "elapsed_seconds": elapsed,
        "cpu_percent": 100 * (cpu_after - cpu_before) / elapsed,
        "system_cpu_percent": _busy_percent(system_before, system_after),
        "gpu_sm_util": monitor.mean(gpus, "utilization"),
        "gpu_mem_util": monitor.mean(gpus, "memory_percent"),
        "peak_memory_bytes": max((value for value in peaks if value is not None), default=None),
        "process_memory_bytes": process_memory_bytes,
        "memory_slope_bytes_per_step": growth.bytes_per_step,
        "leak": bool(growth.leaks),
        "finite": loop.finite,
        "data_wait_fraction": min(1.0, waited / elapsed),
        "notes": _notes(config, loop, growth),
    }


def pipeline_fingerprint(data: Any, dummy: bool) -> str:
    """What the pipeline does with its settings: equal texts are equal pipelines."""
    source = "dummy" if dummy else data.source
    if data.pipeline == "device":
        return f"device: {source} whole on the device, no loader"
    where = f"{data.num_workers} worker processes" if data.num_workers else "the main process"
    return f"{data.pipeline}: {source} loaded in {where}, {data.prefetch} batches ahead"


def _notes(config: Any, loop: StepLoop, growth: memory_growth.Growth) -> list[str]:
    notes = []
    if config.data.pipeline == "device" and config.data.num_workers:
        notes.append("num_workers has no effect: with pipeline=device nothing is loaded")
    if growth.leaks:
        where = " and ".join(growth.leaks)
        notes.append(f"leak: memory ({where}) grows by {growth.bytes_per_step / 1e6:.3g} MB a step")
    if not loop.finite:
        notes.append("the loss is not finite")
    return notes


def _cpu_seconds(workers: list[psutil.Process]) -> float:
    """Of all threads of this process and of the loader's workers."""
    seconds = time.process_time()
    for worker in workers:
        with contextlib.suppress(psutil.Error):
            times = worker.cpu_times()
            seconds += times.user + times.system
    return seconds


def _busy_percent(before: Any, after: Any) -> float | None:
    """Of all cores, between two readings of `psutil.cpu_times`."""
    spent = {name: getattr(after, name) - getattr(before, name) for name in before._fields if "guest" not in name}
    total, idle = sum(spent.values()), spent["idle"] + spent.get("iowait", 0.0)
    return 100 * (1 - idle / total) if total > 0 else None


def _resident(process: psutil.Process) -> int:
    try:
        return process.memory_info().rss
    except psutil.Error:
        return 0
