"""The plans of a config for several GPUs, as `scripts/plan.py` and the table of results make them."""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

from jepa_jax.base.console import Console
from jepa_jax.base.errors import UserError
from jepa_jax.config.schema import validate
from jepa_jax.data.facts import data_facts
from jepa_jax.planning.gpu_compile import Request, StepCompiler, default_folder, require_wheels
from jepa_jax.planning.plan_inputs import measure_loader
from jepa_jax.planning.planner import Plan, Planner
from jepa_jax.reports.plan_report import Circumstances, plan_json, plan_lines
from jepa_jax.runtime.hardware import find_gpus, load_table, num_devices


@dataclasses.dataclass(frozen=True)
class Options:
    """The flags of scripts/plan.py."""

    gpus: tuple[str, ...]
    topology: str = "1x1x1"
    batch_sizes: tuple[int, ...] = ()
    fsdp: bool = False
    variants: bool = True
    loader: bool = True
    gpu_table: str = ""
    price_per_hour: float = 0.0
    cache: pathlib.Path | None = None  # None: the user's cache


def make_plans(config: Any, options: Options, console: Console) -> tuple[list[Plan], Circumstances]:
    """Plans of `config` for each GPU of the options."""
    validate(config)
    table = load_table(options.gpu_table or None)
    gpus = find_gpus(options.gpus, table)
    devices = num_devices(options.topology)
    require_wheels()
    if min(options.batch_sizes, default=2) < 2:
        raise UserError(f"--batch_sizes={','.join(map(str, options.batch_sizes))}: a batch has at least 2 images")
    for size in options.batch_sizes:
        if size % (devices * config.train.accum_steps):
            raise UserError(
                f"--batch_sizes={size}: {devices} devices x {config.train.accum_steps} accumulation steps do not "
                f"divide it; use a multiple of {devices * config.train.accum_steps}"
            )
    compiler = StepCompiler(
        data_facts(config.data, assume=True),
        options.cache or default_folder(),
        on_compile=lambda what: console.line(f"compiling for {what}"),
    )
    planner = Planner(compiler, table)
    requests = [Request(config, gpu, options.topology) for gpu in gpus]
    if options.fsdp:
        requests = [request.changed(mesh__data=-1, mesh__fsdp=devices) for request in requests]
    plans = planner.plans(requests, batch_sizes=options.batch_sizes, variants=options.variants)
    rate, note = measure_loader(config) if options.loader else (None, "switched off")
    about = Circumstances(compiler.data, options.price_per_hour, rate, note)
    return plans, about


def show_plans(plans: Sequence[Plan], about: Circumstances, name: str, console: Console) -> list[dict[str, Any]]:
    """Prints each plan and returns its JSON object."""
    for plan in plans:
        for line in plan_lines(plan, about, name):
            console.line(line)
    return [plan_json(plan, about) for plan in plans]
