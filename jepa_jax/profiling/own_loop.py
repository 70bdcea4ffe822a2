"""The profiler of runs for a training loop of one's own."""

import contextlib
import functools
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Self, TypeVar

import jax

from jepa_jax.base.errors import UserError
from jepa_jax.base.files import make_folder
from jepa_jax.base.processes import num_cores
from jepa_jax.config.groups import ProfileConfig
from jepa_jax.profiling.bottlenecks import NO_CONFIG, Setting
from jepa_jax.profiling.compilations import CompilationCounter, CompiledStep
from jepa_jax.profiling.metrics import epoch_summary
from jepa_jax.profiling.profiler import Profiler
from jepa_jax.profiling.sections import Section, Timeline
from jepa_jax.profiling.trace import TraceWindow
from jepa_jax.runtime.peers import is_first

Batch = TypeVar("Batch")


class LoopProfiler:
    """Takes the steps of a loop, accounts for their time, and writes profile.json and a page; see `profile_loop`."""

    def __init__(
        self,
        step: Callable[..., Any],
        folder: pathlib.Path,
        *,
        batch_size: int,
        steps_per_epoch: int,
        precision: str,
        trace_steps: str,
        write_page: Callable[[pathlib.Path], object],
    ):
        """`write_page` is called with the folder when profile.json is there."""
        if not isinstance(step, jax.stages.Wrapped):
            raise UserError(f"step = {step!r}: not a compiled function; give jax.jit(step)")
        if trace_steps and not re.fullmatch(r"\d+:\d+", trace_steps):
            raise UserError(f"trace_steps = {trace_steps!r}: write the first and the last step as A:B, e.g. 10:15")
        make_folder(folder)
        self._folder, self._write_page, self._steps_per_epoch = folder, write_page, steps_per_epoch
        self._timeline = Timeline(keep_segments=True)
        self._step = CompiledStep(step, signature=_shapes)
        self._trace = TraceWindow(trace_steps, folder / "trace", self._timeline)
        setting = Setting(0, NO_CONFIG, num_cores(), jax.default_backend(), precision, batch_size)
        parts = self._timeline, self._trace, self._step
        self._profiler = Profiler(ProfileConfig(), setting, *parts, steps_per_epoch=steps_per_epoch)
        self._done = 0  # steps
        self._newest: jax.Array | None = None  # result of the last one
        self._stack = contextlib.ExitStack()
        self._lines: list[str] = []

    def __enter__(self) -> Self:
        self._stack.callback(self._profiler.close)
        self._stack.callback(self._trace.close)
        self._stack.enter_context(CompilationCounter(functools.partial(self._timeline.move, Section.COMPILE)))
        self._profiler.start(lambda: self._done, self._folder / "profile.json")
        return self

    def __exit__(self, *exc: object) -> None:
        with self._stack:
            self._end_epoch()
            if is_first():
                self._profiler.write(self._folder / "profile.json", at_end=True)
                self._write_page(self._folder)

    def batches(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """Yields the batches of a loader; the time it takes is the wait for data."""
        self._profiler.start_loop()
        iterator = iter(loader)
        while True:
            if self._trace.begins_at(self._done):
                with self._timeline.section(Section.PROFILER):
                    self._trace.start()
            if self._trace.recording:
                self._trace.begin_step(self._done)
            with self._timeline.section(Section.DATA_WAIT):
                try:
                    batch = next(iterator)
                except StopIteration:
                    return
            yield batch

    def step(self, state: Any, batch: Any) -> Any:
        """Hands a step to the device, waits for the step before, and returns what the step returns."""
        if not self._step.is_ready_for(batch):
            with self._timeline.section(Section.COMPILE):
                self._step.compile(state, batch)
            if self._step.count > 1:
                self._profiler.recompiled()
        began = self._timeline.clock()
        with self._timeline.section(Section.DISPATCH):
            result = self._step(state, batch)
        self._done += 1
        before, newest = self._newest, jax.tree.leaves(result)[-1]
        self._newest = newest
        self._profiler.dispatched(began, newest, None)
        self._wait(before)
        self._trace.completed(self._done - 1)
        recording, ends_trace = self._profiler.must_drain(self._done), self._trace.ends_at(self._done)
        ends_epoch = self._done % self._steps_per_epoch == 0
        if recording or ends_trace or ends_epoch:
            self._wait(newest)
        self._profiler.step_done(self._done)
        if ends_trace:
            with self._timeline.section(Section.PROFILER):
                self._trace.close()
        if recording:
            self._profiler.record(self._done)
        if ends_epoch:
            self._end_epoch()
        return result

    def section(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Charges the time of a `with` block to "validation", "visualization", "checkpoint" or "logging"."""
        try:
            return self._timeline.section(Section(name))
        except ValueError:
            raise UserError(f"section({name!r}): unknown; choose from {', '.join(Section)}") from None

    def summary(self) -> str:
        """Returns where the time of the last epoch went, and what slows it down."""
        return "\n".join(self._lines)

    def _wait(self, result: jax.Array | None) -> None:
        with self._timeline.section(Section.DEVICE_WAIT):
            if result is not None and not result.is_deleted():
                result.block_until_ready()

    def _end_epoch(self) -> None:
        with self._timeline.section(Section.PROFILER):
            record = self._profiler.end_epoch(self._done)
            if record is not None:
                notes = [f"  note: {note}" for note in self._profiler.new_notes()]
                self._lines = epoch_summary(record) + [one["message"] for one in record.bottlenecks] + notes


def _shapes(batch: Any) -> Any:
    leaves, tree = jax.tree.flatten(batch)
    return tree, tuple([(leaf.shape, leaf.dtype) for leaf in leaves])
