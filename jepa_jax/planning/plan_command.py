"""Makes the plans of a config for several GPUs, as `jepa-jax plan` and the table of results need them."""

import dataclasses
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jepa_jax.base.console import Console
from jepa_jax.base.errors import UserError
from jepa_jax.base.files import read_toml
from jepa_jax.config.groups import Config
from jepa_jax.data.facts import data_facts
from jepa_jax.data.pipeline import batches_ready, train_batches
from jepa_jax.data.sources import open_source
from jepa_jax.models.registry import build_encoder
from jepa_jax.planning.absent_gpus import num_devices, require_wheels
from jepa_jax.planning.frontier import Frontier, make_frontier
from jepa_jax.planning.planner import Plan, Planner
from jepa_jax.planning.run_cost import PlanContext
from jepa_jax.planning.step_compiler import Request, StepCompiler, default_folder
from jepa_jax.runtime.hardware import Gpu, find_gpus, load_table
from jepa_jax.runtime.mesh import batch_sharding, make_mesh

LOADER_SECONDS = 1.0
FEW_GPUS = 4  # up to which the largest batch is looked for on each


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
    frontier: str = ""
    memory_budget: float = 0.0


def make_plans(config: Config, options: PlanOptions, console: Console) -> tuple[list[Plan], PlanContext]:
    """Returns the plan of a config for each GPU of the options, and what the plans were told from outside."""
    table = load_table(options.gpu_table or None)
    gpus = find_gpus(options.gpus, table)
    devices = num_devices(options.topology)
    require_wheels()
    if min(options.batch_sizes, default=2) < 2:
        raise UserError(f"--batch_sizes={','.join(map(str, options.batch_sizes))}: a batch has at least 2 samples")
    grain = devices * config.train.accum_steps
    for size in options.batch_sizes:
        if size % grain:
            raise UserError(
                f"--batch_sizes={size}: {devices} devices x {config.train.accum_steps} accumulation steps do not "
                f"divide it; use a multiple of {grain}"
            )
    data = data_facts(config.data, assume=True)
    compiler = StepCompiler(data, default_folder(), on_compile=lambda what: console.line(f"compiling for {what}"))
    mesh = {"mesh.data": -1, "mesh.fsdp": devices} if options.fsdp else {}
    requests = [Request(config, gpu, options.topology).changed(mesh) for gpu in gpus]
    prices = read_prices(options.price_table, table) if options.price_table else {}
    planner = Planner(compiler, table)
    wanted: dict[str, Any] = {
        "batch_sizes": options.batch_sizes,
        "variants": options.variants,
        "largest": options.largest,
    }
    if options.batch_sizes and len(requests) > FEW_GPUS:
        raise UserError(f"--batch_sizes: not for more than {FEW_GPUS} GPUs at once; name fewer in --gpu")
    plans = planner.plans(requests, **wanted) if len(requests) <= FEW_GPUS else each_plan(planner, requests, console)
    rate, note = measure_loader(config) if options.loader else (None, "switched off")
    return plans, PlanContext(data, options.price_per_hour, prices, rate, note, feature_numbers(config))


def each_plan(planner: Planner, requests: Sequence[Request], console: Console) -> list[Plan]:
    """Returns plans for many GPUs, without the search for the largest batch; those that fail are reported."""
    plans = []
    for request in requests:
        try:
            plans += planner.plans([request], variants=False, largest=False)
        except UserError as error:
            console.warn(f"{request.gpu.key} is left out: {error}")
    if not plans:
        raise UserError(f"--gpu={','.join(request.gpu.key for request in requests)}: none could be planned")
    return plans


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
        encoder = nnx.eval_shape(lambda: build_encoder(config, jnp.zeros(shape), nnx.Rngs(0)))
    except Exception:  # a method of another kind: its evaluation is not planned
        return 0
    return int(encoder.feature_dim) * (4 if config.eval.pool == "grid2" else 1)


def plan_frontier(config: Config, plan: Plan, options: PlanOptions, console: Console) -> Frontier:
    """Returns the frontier of memory against time of the config on the GPU of a plan."""
    data = data_facts(config.data, assume=True)
    compiler = StepCompiler(data, default_folder(), on_compile=lambda what: console.line(f"compiling for {what}"))
    planner = Planner(compiler, load_table(options.gpu_table or None))
    return make_frontier(planner, plan.request, round(options.memory_budget * 2**30))


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
