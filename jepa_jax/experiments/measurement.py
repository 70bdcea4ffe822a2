"""Measures one combination of settings: the real training step, fed by the real loader, as training runs it."""

import contextlib
import dataclasses
import hashlib
import itertools
import socket
import time
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding

from jepa_jax.base.errors import UserError
from jepa_jax.config.groups import Config
from jepa_jax.data.contract import Bucketed, Source, abstract_on
from jepa_jax.data.dummy import open_dummy
from jepa_jax.data.pipeline import (
    BatchInfo,
    Delivery,
    TrainBatches,
    bucket_specs,
    eval_batches,
    train_batches,
)
from jepa_jax.data.sources import open_source
from jepa_jax.experiments.confirmation import evaluation_and_checkpoint
from jepa_jax.experiments.rows import Figures
from jepa_jax.experiments.settings import TrialRequest
from jepa_jax.experiments.timing import OnStep, TimedSteps, ignore, measure_steps
from jepa_jax.profiling import speed
from jepa_jax.profiling.accounting import DeviceClock
from jepa_jax.profiling.compilations import CompilationCounter, CompiledStep
from jepa_jax.program.build import build_program, initial_sample
from jepa_jax.program.step import TrainState
from jepa_jax.runtime import memory as process_memory
from jepa_jax.runtime.gpus import jax_gpus
from jepa_jax.runtime.mesh import batch_sharding, check_batch
from jepa_jax.runtime.provenance import unused_gpu
from jepa_jax.runtime.start import setup


def measure(
    request: TrialRequest, *, on_step: OnStep = ignore, before_steps: Callable[[], None] = lambda: None
) -> Figures:
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
        compiled = compile_step(step, state, delivery[0])
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
        figures = measure_steps(config, request, loop)
    most, _ = speed.peak_flops(config.profile.peak_tflops, config.train.precision, mesh.size)
    limits = [(one.memory_stats() or {}).get("bytes_limit") for one in mesh.local_devices]
    return dataclasses.replace(
        figures,
        **compiled,
        flops_per_batch=None if step.flops is None else round(step.flops),
        mfu=speed.mfu(step.flops, figures.avg_step_time, figures.measured_batches or 0, most),
        pipeline_fingerprint=pipeline_fingerprint(config.data, request.use_dummy_data),
        data_source="dummy" if request.use_dummy_data else config.data.source,
        devices=f"{mesh.size} x {mesh.devices.flat[0].device_kind}",
        platform=jax.default_backend(),
        device_limit_bytes=min((limit for limit in limits if limit), default=None),
        card=card_name(),
    )


def card_name() -> str | None:
    """Returns host and UUIDs of the GPUs that this process computes on; None on CPUs."""
    if jax.default_backend() != "gpu":
        return None
    gpus = jax_gpus(jax.local_devices())
    names = gpus.uuids
    gpus.close()
    return f"{socket.gethostname()} {' '.join(names)}" if any(names) else None


def largest_batches(config: Config, source: Source, sharding: NamedSharding) -> list[Delivery]:
    """Returns a batch of the largest bucket, which may be too rare for the timed steps; [] if all batches are alike."""
    if not isinstance(source, Bucketed) or len(bucket_specs(config.data, source)) < 2:
        return []
    padded = source.in_bucket(int(source.buckets.max()))  # holds any element
    batch, _ = next(eval_batches(padded, config.data.batch_size, sharding))
    supplied = BatchInfo(generation_seconds=0, supply_seconds=0, transfer_seconds=0, wait_seconds=0, skipped=[])
    return [(batch, supplied)]


def compile_step(step: CompiledStep, state: TrainState, batch: Any) -> dict[str, Any]:
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
    where = f"{data.workers} worker processes" if data.workers else "the main process"
    return f"{data.pipeline}: {source} loaded in {where}, {data.prefetch} batches ahead"
