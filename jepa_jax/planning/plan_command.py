"""Makes the plans of a config for several GPUs, as `jepa-jax plan` and the table of results need them."""

import dataclasses
import time
from collections.abc import Callable

import jax

from jepa_jax.base.console import Console
from jepa_jax.base.errors import UserError
from jepa_jax.config.groups import Config
from jepa_jax.data.facts import data_facts
from jepa_jax.data.pipeline import batches_ready, train_batches
from jepa_jax.data.sources import open_source
from jepa_jax.planning.absent_gpus import num_devices, require_wheels
from jepa_jax.planning.plan_text import PlanContext
from jepa_jax.planning.planner import Plan, Planner
from jepa_jax.planning.step_compiler import Request, StepCompiler, default_folder
from jepa_jax.runtime.hardware import find_gpus, load_table
from jepa_jax.runtime.mesh import batch_sharding, make_mesh

LOADER_SECONDS = 1.0


@dataclasses.dataclass(frozen=True)
class PlanOptions:
    """The flags of `jepa-jax plan`."""

    gpus: tuple[str, ...]
    topology: str = "1x1x1"
    batch_sizes: tuple[int, ...] = ()
    fsdp: bool = False
    variants: bool = True
    loader: bool = True
    gpu_table: str = ""
    price_per_hour: float = 0.0


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
    plans = Planner(compiler, table).plans(requests, batch_sizes=options.batch_sizes, variants=options.variants)
    rate, note = measure_loader(config) if options.loader else (None, "switched off")
    return plans, PlanContext(data, options.price_per_hour, rate, note)


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
