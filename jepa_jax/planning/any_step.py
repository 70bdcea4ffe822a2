"""Plans any jitted function: memory, verdict, kernels and predicted time on a GPU that need not be there."""

import dataclasses
import functools
import html
import pathlib
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from jepa_jax.base.errors import UserError
from jepa_jax.base.text import gib
from jepa_jax.compiled.buffers import Peak, read_peak, short_scope, source_lines
from jepa_jax.compiled.hlo import parse_hlo
from jepa_jax.compiled.kernels import Kernel, read_kernels
from jepa_jax.planning.absent_gpus import absent_devices, compile_lowered
from jepa_jax.planning.estimate import MemoryNeed, memory_need, verdict_of
from jepa_jax.planning.factors import Prediction, predict, timed_kernels
from jepa_jax.runtime.hardware import Gpu, find_gpus, load_table

Row = Sequence[str]  # cells of a table
MODES = ("train", "infer")
SHOWN = 12  # lines of a table


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """What a compiled function needs on a GPU; printed it is titled tables, in a notebook too."""

    gpu: Gpu
    need: MemoryNeed
    peak: Peak  # the buffers alive at the peak
    unlimited_peak_bytes: int  # the peak if XLA kept everything; the same unless it recomputes
    kernels: list[Kernel]
    prediction: Prediction

    @property
    def verdict(self) -> str:
        """ "fits", "tight" or "does not fit"."""
        return verdict_of(self.need.total, self.gpu.memory_bytes)

    @property
    def fits(self) -> bool:
        return self.need.total <= self.gpu.memory_bytes

    @property
    def recomputed(self) -> int:
        """Kernels that XLA runs again to save memory."""
        return sum(kernel.recomputed for kernel in self.kernels)

    def tables(self) -> list[tuple[str, list[Row]]]:
        """Returns titles and rows: verdict and speed, what is alive at the peak, and the kernels that take longest."""
        groups: list[Row] = [(name, gib(size)) for name, size in self.peak.totals(by="group").items()]
        buffers: list[Row] = [
            (gib(one.bytes), one.shape.partition("{")[0], one.source or "-", short_scope(one.op_name) or one.name)
            for one in self.peak.buffers[:SHOWN]
        ]
        lines: list[Row] = [(name, gib(size)) for name, size in list(self.peak.totals(by="source").items())[:SHOWN]]
        return [
            (f"{self.gpu.name}: {self.verdict}", self._summary()),
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
            ("margin: CUDA, workspace, fragmentation", gib(need.margin)),
            ("needed", f"{gib(need.total)} of {gib(self.gpu.memory_bytes)}"),
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
        *args: its arguments: arrays, or shapes and types (jax.ShapeDtypeStruct). Nothing is computed.
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
    card = gpu if isinstance(gpu, Gpu) else find_gpus([gpu], load_table(gpu_table))[0]
    compiled, peak, kernels, convolution = _compile(step, args, kwargs, card, unlimited=False)
    top = compiled.memory_analysis().peak_memory_in_bytes
    unlimited = top
    if any(kernel.recomputed for kernel in kernels):
        unlimited = _compile(step, args, kwargs, card, unlimited=True)[0].memory_analysis().peak_memory_in_bytes
    need = memory_need(top, convolution)
    return StepPlan(card, need, peak, unlimited, kernels, predict(kernels, card, samples=samples, mode=mode))


def _compile(
    step: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], gpu: Gpu, *, unlimited: bool
) -> tuple[Any, Peak, list[Kernel], int]:
    """Returns the compiled function, its peak, its kernels and the bytes of its largest convolution."""
    sharding = SingleDeviceSharding(absent_devices(gpu, "1x1x1", unlimited)[0])
    jitted = step if isinstance(step, jax.stages.Wrapped) else jax.jit(step)
    args, kwargs = jax.tree.map(functools.partial(_on, sharding), (args, kwargs))
    with tempfile.TemporaryDirectory(prefix="jepa_jax_plan_") as folder:
        notes = pathlib.Path(folder)
        compiled = compile_lowered(jitted.lower(*args, **kwargs), notes)
        text = compiled.as_text()
        hlo = parse_hlo(text)
        return compiled, read_peak(notes, hlo, source_lines(text)), read_kernels(hlo), hlo.largest_convolution_bytes()


def _on(sharding: Any, leaf: Any) -> Any:
    """Returns the shape and type of an array on the absent device; anything else as it is."""
    if not isinstance(leaf, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct):
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
