"""Measures one combination of settings: a step and its loader, as training runs them.

The step is that of a config (`measure`), or one of the user's own, of a plain JAX program (`measure_own_step`): a
function `make(batch, precision, workers)` returns `step` and `batches`, an endless iterable, and a function that takes
one of its elements and returns the loss, a scalar array.

Steps are taken through the training loop's own `Steps`: step n is dispatched before the metrics of step n - 1 are read,
and a step is complete when its metrics have been read. The clock runs from the completion of one step to that of
another, both read while the following step is under way, so that the device never waits for the clock. Batches that the
loader made while the step was compiled are discarded first.
"""

import contextlib
import dataclasses
import hashlib
import itertools
import math
import pathlib
import socket
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np
import psutil
from jax.sharding import NamedSharding

from jepa_jax.base.classes import load_object
from jepa_jax.base.errors import UserError
from jepa_jax.config.groups import Config
from jepa_jax.data.contract import Bucketed, Source
from jepa_jax.data.dummy import open_dummy
from jepa_jax.data.pipeline import (
    BatchInfo,
    Delivery,
    TrainBatches,
    abstract_on,
    batches_ready,
    bucket_specs,
    eval_batches,
    train_batches,
)
from jepa_jax.data.sources import open_source
from jepa_jax.evals.evaluators import SMOKE_IMAGES, EvaluationContext, Moment, Stage, build_evaluators
from jepa_jax.evals.features import Split, part_of
from jepa_jax.evals.knn import QUERIES, knn_accuracy
from jepa_jax.evals.linear_probe import PENALTIES, Standard, fit_softmax, gram_matrix
from jepa_jax.experiments.rows import NEEDED, TrialFigures
from jepa_jax.experiments.settings import TrialRequest
from jepa_jax.profiling import memory_growth, monitor, speed
from jepa_jax.profiling.accounting import DeviceClock, Ledger
from jepa_jax.profiling.compilations import CompilationCounter, CompiledStep
from jepa_jax.profiling.epoch_record import gpu_figures
from jepa_jax.profiling.sections import Section, Timeline
from jepa_jax.program.build import Program, build_program, initial_sample
from jepa_jax.program.checkpoint import Checkpoints
from jepa_jax.program.step import TrainState
from jepa_jax.program.step_metrics import StepMetrics
from jepa_jax.runtime import memory as process_memory
from jepa_jax.runtime.gpus import jax_gpus
from jepa_jax.runtime.mesh import batch_sharding, check_batch
from jepa_jax.runtime.provenance import unused_gpu
from jepa_jax.runtime.start import setup
from jepa_jax.training.progress import Loop, Progress
from jepa_jax.training.steps import Steps

MONITOR_SECONDS = 0.5
READY_BATCHES, READY_PER_WORKER = 3, 2  # that a loader of the user's may have made while the step was compiled

ReadMemory = Callable[[], memory_growth.InUse]
OnStep = Callable[[dict[str, jax.Array], StepMetrics], object]  # called with the batch and the metrics of each step


def measure(
    request: TrialRequest,
    *,
    on_step: OnStep = lambda batch, metrics: None,
    before_steps: Callable[[], None] = lambda: None,
) -> TrialFigures:
    """Measures one repeat; `before_steps` is called when the step has been compiled."""
    config = request.configuration()
    mesh = setup(config)
    check_device(request)
    check_batch(config, mesh)
    open_split: Callable[[Any, str], Source] = open_dummy if request.use_dummy_data else open_source
    source = open_split(config.data, "train")
    sample, sharding = initial_sample(source), batch_sharding(mesh)
    shapes: Any = {"num_train": len(source), "num_classes": len(source.classes), "sample": sample, "mesh": mesh}
    program = build_program(config, **shapes)
    state = program.factory.create(config.train.seed, sample)
    with (
        contextlib.closing(DeviceClock()) as device,
        train_batches(
            config.data, source, seed=config.train.seed, sharding=sharding, crops=config.loader_crops
        ) as batches,
        contextlib.ExitStack() as stack,
    ):
        delivery = next(batches)
        step = CompiledStep(program.train_step, program.useful_step)
        compiled = compile_and_describe(step, state, delivery[0])
        for spec in bucket_specs(config.data, source):  # the other shapes of batches, so that no step waits for them
            other = abstract_on(mesh, spec, config.data.batch_size)
            if not step.is_ready_for(other):
                step.compile(state, other)
        before_steps()
        process_memory.reset_peak()  # compiling may have taken more than any step will
        first = [delivery, *largest_batches(config, source, sharding)]
        loop = TimedSteps(step, state, TrainBatches(one for one in itertools.chain(first, batches)), device, on_step)
        taken = len(first)
        del state, delivery, first  # the loop donates the one and is done with the others soon
        loop.take(taken)
        loop.drain()
        if request.with_evaluation:
            sources = source, open_split(config.data, "test")
            stack.enter_context(evaluation_and_checkpoint(config, program, sources, loop.state))
        figures = measure_steps(request, loop, batches_ready(config.data))
    most, _ = speed.peak_flops(config.profile.peak_tflops, config.train.precision, mesh.size)
    return dataclasses.replace(
        figures,
        **compiled,
        **device_facts(mesh.devices.flat),
        flops_per_batch=None if step.flops is None else round(step.flops),
        mfu=speed.mfu(step.flops, figures.avg_step_time, figures.measured_batches or 0, most),
        pipeline_fingerprint=pipeline_fingerprint(config.data, request.use_dummy_data),
        data_source="dummy" if request.use_dummy_data else config.data.source,
    )


@dataclasses.dataclass(frozen=True)
class Loss:
    """The loss of a step, in the form of the metrics that the training loop reads."""

    packed: jax.Array

    def floats(self) -> dict[str, float]:
        return {"loss": float(self.packed)}


def measure_own_step(request: TrialRequest) -> TrialFigures:
    """Measures one repeat of the step that `request.make` makes."""
    check_device(request)
    chosen = request.combination
    with contextlib.closing(DeviceClock()) as device, CompilationCounter() as compilations:
        made = load_object(request.make)(chosen.batch_size, chosen.precision, chosen.num_workers)
        if not isinstance(made, tuple) or len(made) != 2 or not callable(made[0]):
            raise UserError(f"{request.make} returned {type(made).__name__}; return a tuple of step and batches")
        step, batches = made

        def take_step(state: None, batch: Any) -> tuple[None, Loss]:
            loss = step(batch)
            if not isinstance(loss, jax.Array) or loss.ndim:
                raise UserError(f"the step of {request.make} returned {type(loss).__name__}; return a scalar jax.Array")
            return None, Loss(loss)

        deliveries: Any = endless(batches, request.make)
        loop = TimedSteps(take_step, None, TrainBatches(deliveries), device)  # type: ignore[arg-type]
        loop.take(1)
        loop.drain()
        process_memory.reset_peak()  # compiling may have taken more than any step will
        figures = measure_steps(request, loop, READY_BATCHES + READY_PER_WORKER * chosen.num_workers)
    return dataclasses.replace(
        figures,
        **device_facts(jax.devices()),
        compile_seconds=compilations.seconds,
        compile_cached=compilations.from_cache > 0,
    )


def endless(batches: Iterable[Any], make: str) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yields batches as the loader of a config delivers them."""
    count = 0
    for batch in batches:
        count += 1
        yield batch, {}
    raise UserError(f"the batches of {make} ended after {count}; repeat them without end")


def device_facts(devices: Iterable[jax.Device]) -> dict[str, Any]:
    """Returns the figures that name the devices of a trial: kind, memory, and by host and UUID the GPUs."""
    devices, card = list(devices), None
    if jax.default_backend() == "gpu":
        with contextlib.closing(jax_gpus(jax.local_devices())) as gpus:
            card = f"{socket.gethostname()} {' '.join(gpus.uuids)}" if any(gpus.uuids) else None
    limits = [(one.memory_stats() or {}).get("bytes_limit") for one in jax.local_devices()]
    return {
        "devices": f"{len(devices)} x {devices[0].device_kind}",
        "platform": jax.default_backend(),
        "device_limit_bytes": min((limit for limit in limits if limit), default=None),
        "card": card,
    }


def largest_batches(config: Config, source: Source, sharding: NamedSharding) -> list[Delivery]:
    """Returns a batch of the largest bucket, which may be too rare for the timed steps; [] if all batches are alike."""
    if not isinstance(source, Bucketed) or len(bucket_specs(config.data, source)) < 2:
        return []
    padded = source.in_bucket(int(source.buckets.max()))  # holds any element
    batch, _ = next(eval_batches(padded, config.data.batch_size, sharding))
    supplied = BatchInfo(generation_seconds=0, supply_seconds=0, transfer_seconds=0, wait_seconds=0, skipped=[])
    return [(batch, supplied)]


def compile_and_describe(step: CompiledStep, state: TrainState, batch: Any) -> dict[str, Any]:
    """Compiles the training step; returns the figures of its compilation."""
    began = time.perf_counter()
    with CompilationCounter() as compilations:
        lowered = step.compile(state, batch)
    return {
        "compile_seconds": time.perf_counter() - began,
        "compile_cached": compilations.from_cache > 0,
        # The text holds no source locations, so equal programs have equal texts.
        "program_fingerprint": hashlib.sha256(lowered.as_text().encode()).hexdigest()[:16],
    }


def check_device(request: TrialRequest) -> None:
    """Rejects a measurement that would run on the CPU although a GPU is there or was asked for."""
    if request.gpu_index is not None and jax.default_backend() != "gpu":
        raise UserError(
            f"--gpu_index = {request.gpu_index}: JAX computes on {jax.default_backend()} here; "
            "install JAX for the GPU (nvidia-smi has to list it), or leave the flag out"
        )
    if unused := unused_gpu(request.gpu_index):
        raise UserError(f"figures would be those of the CPU: {unused}")


def pipeline_fingerprint(data: Any, dummy: bool) -> str:
    """Describes what the pipeline does with its settings: equal texts are equal pipelines."""
    source = "dummy" if dummy else data.source
    if data.pipeline == "device":
        return f"device: {source} whole on the device, no loader"
    threads = f" of {data.worker_threads} threads" if data.worker_threads > 1 else ""
    where = f"{data.workers} worker processes{threads}" if data.workers else "the main process"
    return f"{data.pipeline}: {source} loaded in {where}, {data.prefetch} batches ahead"


class TimedSteps:
    """Takes steps as training does; notes when they were complete and when the device lacked data."""

    def __init__(
        self,
        step: CompiledStep,
        state: TrainState,
        batches: TrainBatches,
        device: DeviceClock,
        on_step: OnStep = lambda batch, metrics: None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self._batches, self._on_step, self._clock = batches, on_step, clock
        timeline = Timeline(clock, keep_segments=True)
        self._ledger = Ledger(timeline, device.take)
        self._steps = Steps(step, timeline, lambda began, result, info: device.dispatched(began, result))
        self._loop = Loop(0, state, Progress())
        self.completed: list[float] = []
        self.finite = True

    @property
    def state(self) -> TrainState:
        return self._loop.state

    def take(self, steps: int) -> None:
        for _ in range(steps):
            delivery = self._steps.wait_for(self._batches)
            metrics = self._steps.dispatch(self._loop, delivery)
            self._read(lag=1)
            self._on_step(delivery[0], metrics)

    def discard(self, batches: int) -> None:
        for _ in range(batches):
            next(self._batches)

    def drain(self) -> None:
        self._read(lag=0)

    def waited_for_data(self) -> float:
        """Returns the seconds until now in which the device was idle for lack of data, as training counts them."""
        return self._ledger.update().exposed.get(Section.DATA_WAIT, 0.0)

    def _read(self, lag: int) -> None:
        for _, metrics in self._steps.read(lag=lag):
            self.finite = self.finite and math.isfinite(metrics["loss"])
            self.completed.append(self._clock())


def measure_steps(
    request: TrialRequest, loop: TimedSteps, discarded: int, read_memory: ReadMemory = memory_growth.settled
) -> TrialFigures:
    """Takes warm-up steps, then the timed ones, and more of them if memory has grown.

    `discarded` batches, as many as the loader may have made before, are dropped first.
    """
    workers = psutil.Process().children(recursive=True)
    processes = [psutil.Process(), *workers]
    watch = monitor.Monitor(MONITOR_SECONDS)
    count, images = request.max_batches, request.max_batches * request.combination.batch_size
    try:
        points = [(len(loop.completed), read_memory())]
        loop.discard(discarded)
        loop.take(request.warmup_batches + 1)  # the last of them is timed: the one before it is complete now
        step_seconds = float(np.median(np.diff(loop.completed[-request.warmup_batches - 1 :])))
        print(NEEDED.format(round(time.time() - psutil.Process().create_time() + step_seconds * count)), flush=True)
        began, waited_before, cpu_before = loop.completed[-1], loop.waited_for_data(), speed.cpu_seconds(processes)
        watch.start()
        loop.take(count)  # the last of them is not timed: it is under way at the end, as one was at the start
        elapsed = loop.completed[-1] - began
        waited, cpu = loop.waited_for_data() - waited_before, speed.cpu_seconds(processes) - cpu_before
        samples = watch.take()
    finally:
        watch.close()
    times = np.diff(loop.completed[-count - 1 :])
    loop.drain()
    process_memory_bytes = process_memory.peak_bytes() + sum(_resident(worker) for worker in workers)
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in jax.local_devices()]
    points.append((len(loop.completed), read_memory()))
    for _ in range(memory_growth.BLOCKS if memory_growth.is_suspicious(points) else 0):  # it may be a leak
        loop.take(max(4, count // memory_growth.BLOCKS))
        loop.drain()
        points.append((len(loop.completed), read_memory()))
    growth, gpus = memory_growth.growth(points), gpu_figures(samples)
    notes = [] if loop.finite else ["the loss is not finite"]
    if growth.leaks:
        where = " and ".join(growth.leaks)
        notes.insert(0, f"leak: memory ({where}) grows by {growth.bytes_per_step / 1e6:.3g} MB per step")
    return TrialFigures(
        samples_per_sec=images / elapsed,
        batches_per_sec=count / elapsed,
        avg_step_time=elapsed / count,
        step_time_p50=float(np.percentile(times, 50)),
        step_time_p95=float(np.percentile(times, 95)),
        samples_processed=images,
        measured_batches=count,
        warmup_batches=request.warmup_batches,
        discarded_batches=discarded,
        elapsed_seconds=elapsed,
        cpu_percent=100 * cpu / elapsed,
        system_cpu_percent=monitor.mean(samples, "cpu_percent"),
        gpu_sm_util=monitor.mean(gpus, "utilization"),
        gpu_mem_util=monitor.mean(gpus, "memory_percent"),
        peak_memory_bytes=max((value for value in peaks if value is not None), default=None),
        process_memory_bytes=process_memory_bytes,
        memory_slope_bytes_per_step=growth.bytes_per_step,
        leak=bool(growth.leaks),
        finite=loop.finite,
        data_wait_fraction=min(1.0, waited / elapsed),
        notes=tuple(notes),
    )


def _resident(process: psutil.Process) -> int:
    try:
        return process.memory_info().rss
    except psutil.Error:
        return 0


@contextlib.contextmanager
def evaluation_and_checkpoint(
    config: Config, program: Program, sources: tuple[Source, Source], state: TrainState
) -> Iterator[None]:
    """Does what a run does between its steps, to show that it fits in memory; a checkpoint is written meanwhile.

    Features are extracted from a few hundred images: more of them take more time, but no more memory at once. What
    grows with the data set, the neighbours of k-NN and the data of the linear probe, has its full size.
    """
    few = part_of(sources[0], SMOKE_IMAGES), part_of(sources[1], SMOKE_IMAGES)
    context = EvaluationContext(config, program, few)
    moment = Moment(Stage.EPOCH, step=1, epoch=config.eval.knn_every_epochs or config.eval.every_epochs)
    evaluators = build_evaluators(context)
    for evaluator in evaluators.values():
        if evaluator.due(moment):
            evaluator.run(state, moment)
    context.forget()
    train = sources[0]
    if "classification" in evaluators and train.classes:
        width = state.params["probe"]["kernel"].shape[0]
        evaluate_at_full_size(config.eval, len(part_of(train, config.eval.max_images)), width, len(train.classes))
    with tempfile.TemporaryDirectory() as folder, Checkpoints(pathlib.Path(folder) / "checkpoints") as checkpoints:
        checkpoints.save(1, state, {"step": 1})
        yield
        checkpoints.wait()


def evaluate_at_full_size(config: Any, num_images: int, width: int, num_classes: int) -> None:
    """Runs k-NN on one block of queries and one fit of the probe, with equal features of all train images."""
    labels = np.arange(num_images, dtype=np.int32) % num_classes
    train = Split(np.ones([num_images, width], np.float32), labels)
    some = Split(train.features[:QUERIES], train.labels[:QUERIES])
    knn_accuracy(train, some, num_classes, k=config.knn_k, temperature=config.knn_temperature)
    standardised = Standard.of(train.features)(train.features)
    fit_softmax(standardised, train.labels, num_classes, PENALTIES[0], gram_matrix(standardised))
