"""What a run tells while it trains: metrics and pictures to the sinks, a progress bar, and the profiler's account."""

import contextlib
import dataclasses
import functools
import pathlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Self

import jax
import numpy as np

from jepa_jax.base.errors import UserError
from jepa_jax.base.files import disk_reason
from jepa_jax.base.processes import num_cores
from jepa_jax.base.text import short
from jepa_jax.data.contract import words_of
from jepa_jax.data.pipeline import Delivery, bucket_specs
from jepa_jax.evals.evaluators import moment_after
from jepa_jax.profiling.bottlenecks import Setting
from jepa_jax.profiling.compilations import CompilationCounter, CompiledStep
from jepa_jax.profiling.metrics import GROUP, epoch_metrics, epoch_time
from jepa_jax.profiling.profiler import NullProfiler, Profiler
from jepa_jax.profiling.sections import Section, Timeline
from jepa_jax.profiling.speed import Speedometer, Usage, loader_balance, peak_flops
from jepa_jax.profiling.trace import TraceWindow
from jepa_jax.runtime.memory import pool_doubt
from jepa_jax.runtime.peers import is_first, sum_over_processes
from jepa_jax.training.cost import all_counted, total
from jepa_jax.training.progress import Loop, Progress
from jepa_jax.training.setup import Run
from jepa_jax.training.sinks import Sink, open_sinks

TIMED_STEPS = 3  # from which the time that is left is estimated


class Recorder(contextlib.ExitStack):
    """Opens sinks, profiler and trace of a run in a `with` block, and closes them.

    Several processes compute the same run, and only the first one writes.

    Attributes:
      train_step: the step that the run takes.
      timeline: divides the time of the host among sections.
      profiler: accounts for each epoch, or does nothing if it is switched off.
      trace: the recording that `profile.trace_steps` asks for.
    """

    def __init__(self, run: Run, train_step: CompiledStep, *, clock: Callable[[], float] = time.perf_counter):
        super().__init__()
        config = run.config
        self._run, self._console, self.train_step = run, run.console, train_step
        self.timeline = Timeline(clock, keep_segments=config.profile.enabled)
        folder, with_python = run.folder.path / "trace", config.profile.trace_python
        self.trace = TraceWindow(config.profile.trace_steps, folder, self.timeline, with_python=with_python)
        self.profiler = NullProfiler(self.timeline)
        if config.profile.enabled:
            setting = Setting(
                num_workers=config.data.workers,
                pipeline=config.data.pipeline,
                cores=num_cores(),
                platform=jax.default_backend(),
                precision=config.train.precision,
                batch_size=config.data.batch_size,
            )
            parts, length = (self.timeline, self.trace, train_step), dataclasses.asdict(run.length)
            self.profiler = Profiler(config.profile, setting, *parts, **length)
        self._not_written: set[pathlib.Path] = set()
        self._speed = Speedometer(self.timeline, config.data.batch_size, self.profiler.waited_for_data)
        self._usage = Usage()
        self._sinks: list[Sink] = []
        self._timed, self._from_start, self._said_cost = 0, False, False  # see _refine_cost
        self._newest: dict[str, float] = {}  # metrics of the newest step that was read
        self._found: list[str] = []  # what evaluations at the end of this epoch have found, in words

    def __enter__(self) -> Self:
        self.callback(self._console.stop)
        self.callback(self.close_trace)
        self.callback(self.profiler.close)
        # What evaluations compile counts as compilation too.
        self.enter_context(CompilationCounter(functools.partial(self.timeline.move, Section.COMPILE)))
        return self

    def open(self, loop: Loop) -> None:
        """Opens the sinks at the position of the loop, and adds the time that earlier sessions have used."""
        progress, first, self._from_start = loop.progress, is_first(), loop.step == 0
        self._usage.continue_from(progress.wall_seconds, progress.cpu_seconds if first else 0.0)  # of all processes
        if first:
            sinks = open_sinks(self._run.folder, self._run.config, loop.step, self._console.warn)
            self._sinks += [self.enter_context(contextlib.closing(sink)) for sink in sinks]
        self.profiler.start(lambda: loop.step, self._run.folder.profile)

    def begin_step(self, loop: Loop) -> None:
        """Starts the trace if it is due, and marks the beginning of a step in it."""
        if self.trace.begins_at(loop.step):
            with self.timeline.section(Section.PROFILER), self.optional(self._run.folder.path / "trace"):
                self.trace.start()
        if self.trace.recording:
            self.trace.begin_step(loop.step)

    def before_step(self, loop: Loop, delivery: Delivery) -> None:
        """Compiles the step for a new shape of batch, and notes unreadable images."""
        batch, info = delivery
        if info["skipped"]:
            self.note_skipped(loop, info["skipped"])
        if not self.train_step.is_ready_for(batch):
            with self.timeline.section(Section.COMPILE):
                with self._console.waiting("compiling the training step (kept for later runs)"):
                    self.train_step.compile(loop.state, batch)
            self.show_training(loop)
            doubt = pool_doubt(self.train_step.peak_bytes, jax.local_devices()[0])
            if doubt and self._run.config.profile.plan:
                self._console.warn(doubt)
            if self.train_step.count == 1:
                self._compare_with_loader(info["generation_seconds"])
            if self.train_step.count > len(bucket_specs(self._run.config.data, self._run.sources[0])):
                self._console.warn(f"step {loop.step + 1}: the training step was compiled again; did a shape change?")
                self.profiler.recompiled()

    def _compare_with_loader(self, generation_seconds: float) -> None:
        """Says what the loader can give and what the step wants, where a GPU computes and the host loads."""
        data, options = self._run.config.data, self._run.config.profile
        if jax.default_backend() != "gpu" or data.pipeline == "device":
            return
        peak, _ = peak_flops(options.peak_tflops, self._run.config.train.precision)
        # Each process makes its part of a batch at the same time.
        text, too_slow = loader_balance(data.batch_size, generation_seconds, data.workers, self.train_step.flops, peak)
        fix = "; data will limit it: more cores and data.num_workers=auto, or prepare-data shards --shorter_side"
        if text:
            (self._console.warn if too_slow else self._console.line)(text + (fix if too_slow else ""))

    def completed(self, step: int, metrics: dict[str, float]) -> bool:
        """Advances the progress bar and logs the metrics of a step if that is due; returns whether it was."""
        self._newest = metrics
        self._speed.completed(step)
        if self.trace.recording:
            self.trace.completed(step)
        with self.timeline.section(Section.LOGGING):
            self._console.advance(1, self.in_words)
            due = step % self._run.config.log.every_steps == 0 or step == self._run.length.total_steps
            if due:
                self.log(step, "train", metrics)
                self.log(step, "speed", self._speed.next_window())
            if not self._said_cost:
                self._refine_cost(step)
        return due

    def _refine_cost(self, step: int) -> None:
        """Says how long the run still takes, as soon as a few steps have been timed."""
        rate, length = self._speed.since("run"), self._run.length
        self._timed += 1
        if self._timed <= TIMED_STEPS or rate["images_per_sec"] is None:
            return
        self._said_cost = True
        validation, evaluated = self.timeline.seconds().get(Section.VALIDATION), self._run.cost.elements[0]
        counted = self._from_start and evaluated and all_counted(self._run.evaluators, moment_after(0, 1))
        element = validation / evaluated if counted and validation else None
        step_seconds = self._run.config.data.batch_size / rate["images_per_sec"]
        left = self._run.cost.left(step, step_seconds, element)
        if length.total_steps > step:
            self._console.line(f"cost     about {total(*left)} left, at {step_seconds:.2g} s per step")

    def log(self, step: int, group: str, values: Mapping[str, Any]) -> None:
        row = {f"{group}/{name}": value for name, value in values.items()}
        epoch = step / self._run.length.steps_per_epoch
        for sink in self._sinks:
            sink.write(step, {"epoch": epoch, "time": self._usage.wall_seconds(), **row})

    def draw(self, step: int, name: str, image: np.ndarray) -> None:
        for sink in self._sinks:
            sink.picture(step, name, image)

    def found(self, step: int, words: str) -> None:
        """Says what an evaluation between two steps has found: in the line of the epoch if it ends here.

        An epoch that ended before this process has taken a step, which a signal had cut short, gets no other line.
        """
        ends = step % self._run.length.steps_per_epoch == 0 or step == self._run.length.total_steps
        if self._newest and ends:
            self._found.append(words)
        else:
            self._say_epoch(step, words)

    def _say_epoch(self, step: int, *words: str) -> None:
        length = self._run.length
        epochs = (f"{steps / length.steps_per_epoch:.4g}" for steps in (step, length.total_steps))
        self._console.line("  ".join(filter(None, [f"epoch {'/'.join(epochs)}", self._loss_and_speed(), *words])))

    def close_epoch(self, step: int) -> None:
        """Accounts for the epoch, or the part of one, that ends here."""
        with self.timeline.section(Section.PROFILER):
            record = self.profiler.end_epoch(step)
            if record is not None or self._found:
                self._say_epoch(step, *self._found, epoch_time(record) if record else "")
                self._found = []
            if record is None or not is_first():
                return
            self.log(step, GROUP, epoch_metrics(record))
            for note in self.profiler.new_notes():
                self._console.line(f"  note: {note}")
            for bottleneck in record.bottlenecks:
                if bottleneck["warning"] and bottleneck["first"]:  # the report has all of them
                    self._console.warn(bottleneck["message"])
                    for sink in self._sinks:
                        sink.alert(f"{bottleneck['name']} (epoch {record.epoch})", bottleneck["message"])
            with self.optional(self._run.folder.profile):
                self.profiler.write(self._run.folder.profile)

    def close_trace(self) -> None:
        with self.optional(self._run.folder.path / "trace"):
            self.trace.close()

    def note_skipped(self, loop: Loop, names: Iterable[str]) -> None:
        """Warns once of each unreadable image, which another image replaces, and counts it."""
        seen = loop.progress.skipped_images
        for name in sorted(set(names) - set(seen)):
            seen.append(name)
            self._console.warn(f"{name}: unreadable, another image stands in for it ({len(seen)} so far)")

    def show_training(self, loop: Loop) -> None:
        self._console.start("train", self._run.length.total_steps, loop.step)

    def in_words(self) -> str:
        """Returns loss, speed and rate of the newest step; "" before the first one of this session."""
        if not self._newest:
            return ""
        waited = self._speed.since("run")["data_wait_percent"] or 0
        wait = f"  data wait {waited:.0f} %" if waited >= 1 else ""
        return f"{self._loss_and_speed()}  lr {self._newest['lr']:.2e}{wait}"

    def _loss_and_speed(self) -> str:
        if not self._newest:
            return ""
        loss, rate = f"loss {self._newest['loss']:.4g}", self._speed.since("run")["images_per_sec"]
        return loss if rate is None else f"{loss}  {short(rate, 3)} {words_of(self._run.program.spec)}/s"

    def images_per_sec(self, progress: Progress) -> float | None:
        """Returns the speed of this session, or else of the one before."""
        return self._speed.since("run")["images_per_sec"] or progress.images_per_sec

    def totals(self) -> dict[str, float]:
        """Returns wall seconds, and CPU seconds of all processes."""
        totals = self._usage.totals()
        return totals | {"cpu_seconds": sum_over_processes(totals["cpu_seconds"])}

    @contextlib.contextmanager
    def optional(self, what: pathlib.Path) -> Iterator[None]:
        """Goes on if a file cannot be written that the run can do without, with one warning.

        Only a missing folder of the run ends it.
        """
        try:
            yield
        except (OSError, RuntimeError, ValueError, UserError) as error:
            self._run.folder.check_still_there()
            if what not in self._not_written:
                self._not_written.add(what)
                self._console.warn(f"{what}: could not be written ({disk_reason(error)}); the run goes on without it")
