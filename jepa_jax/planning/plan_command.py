"""Makes the plans of a config for several GPUs, as `jepa-jax plan` and the table of results need them.

`check_flops` and `check_peak` compare a plan with what can be measured here.
"""

import dataclasses
import os
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jepa_jax.base.console import Console
from jepa_jax.base.errors import UserError
from jepa_jax.base.files import read_toml
from jepa_jax.compiled.flops import Rules, jaxpr_flops
from jepa_jax.config.groups import Config
from jepa_jax.config.recipe import LadderStep
from jepa_jax.data.contract import abstract_batch
from jepa_jax.data.facts import DataFacts, data_facts
from jepa_jax.data.photos.crops import batch_spec
from jepa_jax.data.pipeline import batches_ready, train_batches
from jepa_jax.data.sources import open_source
from jepa_jax.models.registry import build_encoder
from jepa_jax.models.rngs import init_rngs
from jepa_jax.planning.absent_gpus import num_devices, require_wheels
from jepa_jax.planning.ladder import ladder_steps, make_ladder
from jepa_jax.planning.planner import FailedPlan, Plan, Planner
from jepa_jax.planning.run_cost import PlanContext
from jepa_jax.planning.step_compiler import Request, StepCompiler, default_folder, program_for, trace_step
from jepa_jax.program.config import changed_config
from jepa_jax.runtime.allocator import pool_fraction
from jepa_jax.runtime.hardware import Gpu, find_gpus, gpu_of_device, load_table
from jepa_jax.runtime.memory import is_out_of_memory
from jepa_jax.runtime.mesh import batch_sharding, make_mesh

LOADER_SECONDS = 1.0
FEW_GPUS = 4  # up to which the largest batch is looked for on each
MEASURED_STEPS = 3  # of a check on a GPU


@dataclasses.dataclass(frozen=True)
class PlanOptions:
    """The flags of `jepa-jax plan`."""

    gpus: tuple[str, ...]
    topology: str = "1x1x1"
    batch_sizes: tuple[int, ...] = ()
    fsdp: bool = False
    variants: bool = True
    loader: bool = True
    largest: bool = True
    gpu_table: str = ""
    price_per_hour: float = 0.0
    price_table: str = ""
    frontier: str = ""  # page to draw it to; any text asks for it
    memory_budget: float = 0.0
    ladder: bool = False
    sizes_of: str = ""


def make_plans(
    config: Config, options: PlanOptions, console: Console, ladder: Sequence[LadderStep] = ()
) -> tuple[list[Plan], list[FailedPlan], PlanContext]:
    """Returns the plans of a config, the GPUs that it cannot be compiled for, and what was known from outside.

    `ladder` are the steps of the recipe's, for `options.ladder`.
    """
    table = load_table(options.gpu_table or None)
    gpus = find_gpus(options.gpus, table)
    devices = num_devices(options.topology)
    require_wheels()
    grain = devices * config.train.accum_steps
    if wrong := [size for size in options.batch_sizes if size % grain]:
        raise UserError(
            f"--batch_sizes={wrong[0]}: {devices} devices x {config.train.accum_steps} accumulation steps do not "
            f"divide it; use a multiple of {grain}"
        )
    mesh = {"mesh.data": -1, "mesh.fsdp": devices} if options.fsdp else {}
    fraction = pool_fraction(os.environ)
    requests = [Request(config, gpu, options.topology, memory_fraction=fraction).changed(mesh) for gpu in gpus]
    for flag, value in (("batch_sizes", options.batch_sizes), ("ladder", options.ladder)):
        if value and len(requests) > FEW_GPUS:
            raise UserError(f"--{flag}: not for more than {FEW_GPUS} GPUs at once; name fewer in --gpu")
    steps = ladder_steps(requests[0], ladder, options.sizes_of)
    prices = read_prices(options.price_table, table) if options.price_table else {}
    data = data_facts(config.data, assume=True)
    compiler = StepCompiler(data, default_folder(), on_compile=lambda what: console.line(f"compiling for {what}"))
    planner = Planner(compiler, table)
    plans, failed = each_plan(planner, requests, options, console)
    if options.frontier:
        frontier = planner.frontier(plans[0].request, round(options.memory_budget * 2**30))
        plans[0] = dataclasses.replace(plans[0], frontier=frontier)
    if options.ladder:
        ladders = [make_ladder(planner, plan.request, steps, options.sizes_of) for plan in plans]
        plans = [dataclasses.replace(plan, ladder=one) for plan, one in zip(plans, ladders, strict=True)]
    rate, note = measure_loader(config) if options.loader else (None, "switched off")
    return plans, failed, PlanContext(data, options.price_per_hour, prices, rate, note, feature_numbers(config))


def each_plan(
    planner: Planner, requests: Sequence[Request], options: PlanOptions, console: Console
) -> tuple[list[Plan], list[FailedPlan]]:
    """Returns a plan per GPU, of many without searching for the largest batch, and the GPUs that failed."""
    few = len(requests) <= FEW_GPUS
    search = {"variants": few and options.variants, "largest": few and options.largest}
    plans, failed = [], []
    for request in requests:
        try:
            plans.append(planner.plan(request, batch_sizes=options.batch_sizes, **search))
        except UserError as error:
            if request is requests[-1] and not plans:
                raise
            console.warn(f"{request.gpu.key}: {error}")
            failed.append(FailedPlan(request, str(error)))
    return plans, failed


def read_prices(path: str, table: Mapping[str, Gpu]) -> dict[str, float]:
    """Returns prices per hour and GPU from a TOML file of lines such as `rtx4090 = 0.45`."""
    found = read_toml(pathlib.Path(path), f"--price_table={path}", "name a TOML file of lines such as rtx4090 = 0.45")
    for key, price in found.items():
        if key not in table:
            raise UserError(f"--price_table={path}: {key}: no GPU of the table; known are {', '.join(table)}")
        if isinstance(price, bool) or not isinstance(price, int | float) or price < 0:
            raise UserError(f"--price_table={path}: {key} = {price!r}: a price per hour is a number of at least 0")
    return {key: float(price) for key, price in found.items()}


def feature_numbers(config: Config) -> int:
    """Returns how many numbers the features of an image are; 0 for methods without an encoder of the registry."""
    try:
        shape = (1, config.data.view_size, config.data.view_size, config.data.channels)
        encoder = nnx.eval_shape(lambda: build_encoder(config, jnp.zeros(shape), init_rngs(0)))
    except Exception:  # a method of another kind: its evaluation is not planned
        return 0
    return int(encoder.feature_dim) * (4 if config.eval.pool == "grid2" else 1)


def measure_loader(config: Config, clock: Callable[[], float] = time.perf_counter) -> tuple[float | None, str]:
    """Returns the images per second that this machine's loader delivers, or None and why they were not measured."""
    if config.data.pipeline == "device":
        return None, "no loader"
    try:
        source = open_source(config.data, "train")
    except UserError:
        return None, "the data is not there"
    sharding = batch_sharding(make_mesh(1, 1, jax.devices()[:1]))
    try:
        with train_batches(config.data, source, seed=0, sharding=sharding, crops=config.loader_crops) as batches:
            for _ in range(1 + batches_ready(config.data)):  # workers start; what is ready was made before
                jax.block_until_ready(next(batches)[0])
            started, images = clock(), 0
            while clock() - started < LOADER_SECONDS:
                jax.block_until_ready(next(batches)[0])
                images += config.data.batch_size
            return images / (clock() - started), ""
    except UserError as error:  # the plan itself does not need the data
        return None, str(error)


class PlanCheck(NamedTuple):
    """A predicted figure beside the one it is compared with."""

    what: str
    predicted: float
    measured: float

    @property
    def error_percent(self) -> float:
        return 100 * (self.predicted / self.measured - 1)


def check_flops(config: Config, data: DataFacts) -> PlanCheck:
    """Compares the operations of a step on one CPU device with XLA's analysis; both count a loop body once."""
    config = changed_config(config, {"mesh.data": -1, "mesh.fsdp": 1})
    program = program_for(config, data, jax.devices("cpu")[:1])
    traced = trace_step(program, abstract_batch(batch_spec(config, data.spec), config.data.batch_size))
    counted = jaxpr_flops(traced.jaxpr.jaxpr, Rules(platform="cpu", loops_once=True, elementwise=True))
    xla = traced.lower().cost_analysis()["flops"]
    return PlanCheck("operations per step on CPU, against XLA's count", counted, xla)


def check_peak(plan: Plan, data: DataFacts) -> PlanCheck:
    """Runs a few steps on the GPUs of this machine and compares their allocator's peak with the plan's."""
    config, wanted = plan.request.config, plan.request.devices
    devices = jax.local_devices()
    here = gpu_of_device(devices[0].device_kind, None, load_table())
    if here is None or here.name != plan.request.gpu.name or len(devices) < wanted:
        raise UserError(
            f"--check: the plan is for {wanted} x {plan.request.gpu.name}, this machine has "
            f"{len(devices)} x {devices[0].device_kind}; check a plan on the GPUs it is for"
        )
    program = program_for(config, data, devices[:wanted])
    sample, batch = (
        {name: np.zeros(leaf.shape, leaf.dtype) for name, leaf in abstract_batch(spec, config.data.batch_size).items()}
        for spec in (data.spec, batch_spec(config, data.spec))
    )
    try:
        state = program.factory.create(config.train.seed, sample)
        for _ in range(MEASURED_STEPS):
            state, metrics = program.train_step(state, batch)
        jax.block_until_ready(metrics)
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(f"--check: memory ran out; the plan says: {plan.estimate.verdict}") from error
    peak = (devices[0].memory_stats() or {})["peak_bytes_in_use"]
    return PlanCheck("peak bytes of a device, against its allocator", plan.estimate.facts.peak_bytes, peak)
