"""Plans any jitted function: memory, verdict, kernels and predicted time on a GPU that need not be there."""

import dataclasses
import html
import os
import pathlib
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding

from jepa_jax.base.errors import UserError
from jepa_jax.base.machine import has_nvidia_driver
from jepa_jax.base.text import gib
from jepa_jax.compiled.buffers import Peak, read_peak, short_scope, source_lines
from jepa_jax.compiled.hlo import CompiledProgram, parse_hlo
from jepa_jax.compiled.kernels import Kernel, read_kernels
from jepa_jax.planning.absent_gpus import absent_devices, compile_lowered
from jepa_jax.planning.absent_meshes import count_devices, lower
from jepa_jax.planning.estimate import MemoryNeed, exchange_seconds, memory_need, verdict_of
from jepa_jax.planning.factors import Prediction, predict, timed_kernels
from jepa_jax.runtime.allocator import pool_fraction
from jepa_jax.runtime.hardware import Gpu, find_gpus, load_table, lowering_for
from jepa_jax.runtime.platforms import prepare_to_plan

Row = Sequence[str]  # cells of a table
ARRAYS = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)
MODES = ("train", "infer")
SHOWN = 12  # lines of a table


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """What a compiled function needs on a GPU; printed it is titled tables, in a notebook too."""

    gpu: Gpu
    devices: int  # GPUs that the arguments and the function are sharded over
    need: MemoryNeed  # of each of them
    peak: Peak  # the buffers alive at the peak
    unlimited_peak_bytes: int  # the peak if XLA kept everything; the same unless it recomputes
    kernels: list[Kernel]
    prediction: Prediction
    memory_fraction: float  # of the GPU's memory that JAX takes

    @property
    def pool_bytes(self) -> int:
        """Bytes that the function can have: the pool that JAX takes of the GPU."""
        return round(self.memory_fraction * self.gpu.memory_bytes)

    @property
    def verdict(self) -> str:
        """ "fits", "tight" or "does not fit"."""
        return verdict_of(self.need.total, self.pool_bytes)

    @property
    def fits(self) -> bool:
        return self.need.total <= self.pool_bytes

    @property
    def recomputed(self) -> int:
        """Kernels that XLA runs again to save memory."""
        return sum(kernel.recomputed for kernel in self.kernels)

    def tables(self) -> list[tuple[str, list[Row]]]:
        """Returns titles and rows: verdict and speed, what is alive at the peak, and the kernels that take longest."""
        count = f"{self.devices} x " if self.devices > 1 else ""
        groups: list[Row] = [(name, gib(size)) for name, size in self.peak.totals(by="group").items()]
        buffers: list[Row] = [
            (gib(one.bytes), one.shape.partition("{")[0], one.source or "-", short_scope(one.op_name) or one.name)
            for one in self.peak.buffers[:SHOWN]
        ]
        lines: list[Row] = [(name, gib(size)) for name, size in list(self.peak.totals(by="source").items())[:SHOWN]]
        return [
            (f"{count}{self.gpu.name}: {self.verdict}", self._summary()),
            ("alive at the peak, by what it is", groups),
            ("alive at the peak, by the line that made it", lines),
            ("largest buffers at the peak", buffers),
            ("kernels by predicted time", self._kernel_rows()),
        ]

    def _summary(self) -> list[Row]:
        need, speed = self.need, self.prediction
        low, high = (1e3 * speed.samples / rate for rate in reversed(speed.predicted))
        rows: list[Row] = [
            ("peak of the compiled function (a lower bound)", gib(need.peak)),
            ("margin: workspace of convolutions, fragmentation", gib(need.margin)),
            (
                f"needed, of {100 * self.memory_fraction:.0f} % of the GPU",
                f"{gib(need.total)} of {gib(self.pool_bytes)}",
            ),
            ("predicted time of a call", f"{1e3 * speed.seconds:,.2f} ms ({low:,.2f} to {high:,.2f})"),
            ("bound at the peak rates", f"{1e3 * speed.bound_seconds:,.2f} ms"),
            ("how far predictions are off", speed.error_text),
        ]
        if self.recomputed:
            cost = f"{self.recomputed} kernels, {1e3 * speed.recomputing_seconds:,.2f} ms"
            rows.append(("XLA recomputes to save memory", f"{cost}; peak without: {gib(self.unlimited_peak_bytes)}"))
        return rows

    def _kernel_rows(self) -> list[Row]:
        timed = timed_kernels(self.kernels, self.gpu, self.prediction.factors.shares)
        return [
            (f"{1e3 * seconds:,.3f} ms", kernel.kind, f"x {kernel.runs}", short_scope(kernel.scope))
            for seconds, kernel in timed[:SHOWN]
        ]

    def __str__(self) -> str:
        lines = []
        for title, rows in self.tables():
            widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
            cells = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows]
            lines += ["", title, *("  " + "  ".join(row).rstrip() for row in cells)]
        return "\n".join(lines[1:])

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def plan(
    step: Callable[..., Any],
    *args: Any,
    gpu: str | Gpu = "rtx4090",
    mode: str = "train",
    samples: int = 1,
    gpu_table: str | None = None,
    **kwargs: Any,
) -> StepPlan:
    """Compiles a function for a GPU that need not be there, and returns what it needs and how long it takes.

    Args:
        step: a function, jitted or not; donated arguments count as donated.
        *args: its arguments: arrays, or shapes and types (jax.ShapeDtypeStruct). Nothing is computed. A NamedSharding
          of theirs, of `in_shardings` or in the function is kept: over a mesh of 8 devices, or an AbstractMesh of that
          size, the plan is for 8 GPUs of one host.
        gpu: a name of the table of GPUs (`jepa-jax plan --help`), or an entry of it.
        mode: "train" or "infer": which measurements the prediction rests on.
        samples: that one call processes, for the speed in samples per second.
        gpu_table: TOML file with more GPUs.
        **kwargs: further arguments of the function.

    Raises:
        UserError: the GPU is not known, the compiler is not installed, or the function cannot be compiled.
    """
    if mode not in MODES:
        raise UserError(f"mode={mode!r}: use {' or '.join(MODES)}")
    if not has_nvidia_driver():
        prepare_to_plan()  # or JAX would drop the compiler together with the driver that it misses
    card = gpu if isinstance(gpu, Gpu) else find_gpus([gpu], load_table(gpu_table))[0]
    fraction = pool_fraction(os.environ)
    leaves, tree = jax.tree.flatten((args, kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, ARRAYS)]
    arguments = [_shape_of(leaves[i]) for i in places]
    jitted = step if isinstance(step, jax.stages.Wrapped) else jax.jit(step)

    def call(function: Callable[..., Any], arrays: Sequence[Any]) -> Any:
        given = dict(zip(places, arrays, strict=True))
        own, named = jax.tree.unflatten(tree, [given.get(i, leaf) for i, leaf in enumerate(leaves)])
        return function(*own, **named)

    with lowering_for(card):
        traced = jax.make_jaxpr(lambda *arrays: call(jitted, arrays))(*arguments)
    sharded = count_devices(traced, arguments)
    devices = sharded or 1

    def compiled(unlimited: bool) -> tuple[int, CompiledProgram, Peak]:
        """Returns the peak in bytes, the program and what is alive at the peak."""
        there = absent_devices(card, f"1x1x{devices}", unlimited, fraction)
        alone = SingleDeviceSharding(there[0])
        own = [jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=alone) for one in arguments]
        with lowering_for(card):
            lowered = lower(traced, arguments, there) if sharded else call(jitted.lower, own)
        with tempfile.TemporaryDirectory(prefix="jepa_jax_plan_") as folder:
            program = compile_lowered(lowered, pathlib.Path(folder))
            text = program.as_text()
            hlo = parse_hlo(text)
            peak = read_peak(pathlib.Path(folder), hlo, source_lines(text))
            return program.memory_analysis().peak_memory_in_bytes, hlo, peak

    top, hlo, peak = compiled(unlimited=False)
    kernels = read_kernels(hlo)
    unlimited = compiled(unlimited=True)[0] if any(kernel.recomputed for kernel in kernels) else top
    sent = sum(wire for _, wire in hlo.collectives().values())
    exchange = exchange_seconds(sent, card, devices)
    speed = predict(kernels, card, samples=samples, mode=mode, exchange_seconds=exchange)
    need = memory_need(top, hlo.largest_convolution_bytes())
    return StepPlan(card, devices, need, peak, unlimited, kernels, speed, fraction)


def _shape_of(array: Any) -> jax.ShapeDtypeStruct:
    sharding = getattr(array, "sharding", None)
    return jax.ShapeDtypeStruct(
        array.shape, array.dtype, sharding=sharding if isinstance(sharding, NamedSharding) else None
    )
