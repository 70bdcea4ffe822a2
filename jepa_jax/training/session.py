"""One process's part of a run: clocks, sinks, checkpoints, signals and the summary."""

import collections
import contextlib
import dataclasses
import functools
import math
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jepa_jax.base.errors import DataLost, Diverged, UserError
from jepa_jax.base.files import disk_reason
from jepa_jax.base.selection import SELECTION_KEY
from jepa_jax.base.signals import Interrupted, InterruptFlag
from jepa_jax.data.pipeline import Delivery, TrainBatches
from jepa_jax.evals.features import fingerprint
from jepa_jax.evals.references import measured_baselines
from jepa_jax.profiling.compilations import CompilationCounter, CompiledStep
from jepa_jax.profiling.metrics import GROUP, epoch_metrics, epoch_summary
from jepa_jax.profiling.profiler import NullProfiler, Profiler
from jepa_jax.profiling.sections import Section, Timeline
from jepa_jax.profiling.speed import Speedometer, Usage, peak_memory_bytes
from jepa_jax.profiling.trace import TraceWindow
from jepa_jax.program.checkpoint import Checkpoints, no_whole_checkpoint
from jepa_jax.program.step import TrainState
from jepa_jax.program.step_metrics import StepMetrics
from jepa_jax.runtime.peers import Votes, is_first, sum_over_processes
from jepa_jax.training.optional_files import OptionalFiles
from jepa_jax.training.progress import FINAL_FIGURES, Loop, Progress
from jepa_jax.training.setup import Run
from jepa_jax.training.sinks import Sink, open_sinks

FINITE = ("loss", "grad_norm", "update_norm")  # metrics that must be: they tell whether a step's result is


class Session:
    """Opens everything that a run writes to in a `with` block, and closes it.

    Several processes compute the same run: the first one writes, the others only compute and save their shards.
    """

    def __init__(
        self, run: Run, *, clock: Callable[[], float] = time.perf_counter, train_step: CompiledStep | None = None
    ):
        self._run, self._config, self._length, self._console = run, run.config, run.length, run.console
        self._writes = is_first()
        self.timeline = Timeline(clock, keep_segments=run.config.profile.enabled)
        self.trace = TraceWindow(run.config.profile.trace_steps, run.folder.path / "trace")
        self._train_step = train_step or CompiledStep(run.program.train_step, run.program.useful_step)
        self.profiler = NullProfiler(self.timeline)
        if run.config.profile.enabled:
            self.profiler = Profiler(run.config, run.length, self.timeline, self.trace, self._train_step)
        warn = run.console.warn
        self.checkpoints = Checkpoints(run.folder.checkpoints, run.config.train.checkpoint_keep, warn=warn)
        self.best = Checkpoints(run.folder.best, warn=warn) if run.config.train.keep_best else None
        self.optional = OptionalFiles(run.folder, warn)
        self.interrupt = InterruptFlag()
        self._speed = Speedometer(self.timeline, run.config.data.batch_size, self.profiler.waited_for_data)
        self._usage = Usage()
        self._sinks: list[Sink] = []
        # Not read yet: metrics of steps, and what the processes vote beside each of them.
        self._pending: collections.deque[tuple[int, StepMetrics, jax.Array | int]] = collections.deque()
        self._votes = Votes(run.program.mesh) if jax.process_count() > 1 else None
        self._agreed = 0  # number of the signal that all processes act on
        self._newest: dict[str, float] = {}  # metrics of the newest step that was read in this session
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "Session":
        self._stack.callback(self._console.stop)
        self._stack.callback(self.close_trace)
        self._stack.callback(self.profiler.close)
        self._stack.enter_context(self.interrupt)
        # What evaluations compile counts as compilation too.
        move = functools.partial(self.timeline.move, Section.COMPILE)
        self._stack.enter_context(CompilationCounter(move))
        self._stack.enter_context(self.checkpoints)
        if self.best:
            self._stack.enter_context(self.best)
        return self

    def __exit__(self, *exc: Any) -> None:
        self._stack.__exit__(*exc)

    def restore_or(self, initial_state: Callable[[], TrainState]) -> Loop:
        """Returns the position of the newest checkpoint, or the start of the run."""
        # The best state is a checkpoint like any other; a process that was killed may have left no newer one.
        # Of equally new ones the ordinary one counts: it was written after actions that followed the choice.
        opened = [checkpoints for checkpoints in (self.checkpoints, self.best) if checkpoints]
        kept = [checkpoints for checkpoints in opened if checkpoints.latest_step() is not None]
        if kept:
            loop = self._restore(max(kept, key=lambda checkpoints: checkpoints.latest_step() or 0), opened)
        elif any(checkpoints.all_damaged for checkpoints in opened):
            raise no_whole_checkpoint(opened)
        else:
            loop = Loop(0, initial_state(), Progress())
        before = loop.progress.cpu_seconds if self._writes else 0.0  # of all processes
        self._usage.continue_from(loop.progress.wall_seconds, before)
        if self._writes:
            sinks = open_sinks(self._run.folder, self._config, loop.step, self._console.warn)
            self._sinks += [self._stack.enter_context(contextlib.closing(sink)) for sink in sinks]
        self.profiler.start(lambda: loop.step, self._run.folder.profile)
        return loop

    def _restore(self, newest: Checkpoints, opened: Sequence[Checkpoints]) -> Loop:
        """Returns the position of a checkpoint; damaged ones are out of the way of later saves then."""
        state, stored = newest.restore(self._run.program.factory.abstract)
        for checkpoints in opened:
            checkpoints.set_aside_damaged()
        loop = Loop(stored["step"], state, Progress.of(stored))
        self._console.line(f"resumed at step {loop.step} of {self._length.total_steps} in {self._run.folder.path}")
        if self.best and loop.progress.best and self.best.latest_step() is None:
            self._console.warn("the best state was damaged and is lost; the choice begins again at this step")
            loop.progress.best = None
        return loop

    # What the loop does.

    def start_loop(self, loop: Loop) -> None:
        """Prepares for the first batch; the time before it is start-up."""
        self.show_training(loop)
        self.profiler.start_loop()

    def wait_for(self, batches: TrainBatches) -> Delivery:
        """Returns the next batch and how it was supplied; a signal ends the waiting."""
        with self.timeline.section(Section.DATA_WAIT):
            if self._votes is None:
                return batches.wait(self.interrupt.check)
            try:
                return next(batches)
            except DataLost as error:  # the others have theirs: no step is left on which all could agree to save
                raise UserError(str(error)) from error

    def dispatch(self, loop: Loop, delivery: Delivery) -> None:
        """Hands the next step to the device, compiling it first if necessary; its metrics are read later."""
        batch, info = delivery
        if not self._train_step.is_ready_for(batch):
            with self.timeline.section(Section.COMPILE):
                self._train_step.compile(loop.state, batch)
            if self._train_step.count > self._run.expected_compilations:
                self._console.warn(f"step {loop.step + 1}: the training step was compiled again; did a shape change?")
                self.profiler.recompiled()
        if self.trace.begins_at(loop.step):
            with self.timeline.section(Section.PROFILER), self.optional(self._run.folder.path / "trace"):
                self.trace.start()
        began = self.timeline.clock()
        with self.timeline.section(Section.DISPATCH), self.trace.marking(loop.step):
            loop.state, metrics = self._train_step(loop.state, batch)
        loop.step += 1
        self.profiler.dispatched(began, metrics.packed, info)
        self._pending.append((loop.step, metrics, self._cast_vote()))
        self.note_skipped(loop, info["skipped"])

    def read_metrics(self, loop: Loop, *, lag: int) -> None:
        """Reads the metrics of all but the newest `lag` steps; raises Diverged if they are not finite."""
        self._read_all_but(lag)
        self.profiler.step_done(loop.step)

    def drain(self) -> None:
        """Reads the metrics of all steps."""
        self._read_all_but(0)

    def _read_all_but(self, lag: int) -> None:
        while len(self._pending) > lag:
            step, metrics, vote = self._pending.popleft()
            with self.timeline.section(Section.DEVICE_WAIT):
                values = metrics.floats()
                if self._votes:
                    self._agreed = max(self._agreed, int(jax.device_get(vote)))
            self._require_finite(step, values)
            self._newest = values
            self._speed.completed(step)
            with self.timeline.section(Section.LOGGING):
                self._console.advance(1, self.in_words)
                if step % self._config.log.every_steps == 0 or step == self._length.total_steps:
                    self.log(step, "train", values)
                    self.log(step, "speed", self._speed.next_window())

    def _require_finite(self, step: int, values: Mapping[str, float]) -> None:
        if all(math.isfinite(values[name]) for name in FINITE):
            return
        self._pending.clear()
        terms = ", ".join(f"{name} {value:.4g}" for name, value in values.items())
        last = self.checkpoints.whole_step()
        good = "none yet" if last is None else f"step {last} in {self._run.folder.checkpoints}"
        raise Diverged(
            f"step {step}: the loss or its gradient is not finite ({terms}); last good checkpoint: {good}; "
            "in another --workdir, lower config.optim.lr, lengthen config.optim.warmup_epochs or set "
            "config.optim.clip_norm"
        )

    def _cast_vote(self) -> jax.Array | int:
        """Returns the signal that a process has received by now, or 0; with several processes, on the device."""
        own = int(self.interrupt.raised or 0)
        return self._votes.cast(own) if self._votes else own

    def raise_if_interrupted(self) -> None:
        """Raises Interrupted if SIGINT or SIGTERM has arrived; several processes do so after the same step."""
        if self._votes is None:
            self.interrupt.check()
        elif self._agreed:
            raise Interrupted(signal.Signals(self._agreed))

    def agree_on_signals(self) -> None:
        """Raises Interrupted if a process has received a signal; waits for all, so call it between computations."""
        self._agreed = max(self._agreed, int(jax.device_get(self._cast_vote())))
        self.raise_if_interrupted()

    # What actions do.

    def log(self, step: int, group: str, values: Mapping[str, Any]) -> None:
        """Writes values to all sinks, and warns if a checkpoint could not be written."""
        self.checkpoints.warn_if_failed()
        row = {f"{group}/{name}": value for name, value in values.items()}
        for sink in self._sinks:
            sink.write(step, {"epoch": step / self._length.steps_per_epoch, "time": self._usage.wall_seconds(), **row})

    def draw(self, step: int, name: str, image: np.ndarray) -> None:
        """Shows a uint8 image [h, w, 3] in all sinks that show images."""
        for sink in self._sinks:
            sink.picture(step, name, image)

    def save(self, loop: Loop, evaluated_statistics: Callable[[TrainState], Any]) -> None:
        """Saves a checkpoint with what evaluations read of it; the writing goes on in the background."""
        self._run.folder.check_still_there()
        if loop.step != self.checkpoints.latest_step():
            self._save(self.checkpoints, loop, evaluated_statistics)

    def save_best(self, loop: Loop, evaluated_statistics: Callable[[TrainState], Any]) -> bool:
        """Saves the best state so far, in place of the one before, and waits until it is on disk; returns whether."""
        assert self.best is not None  # there is a figure to choose by
        self._run.folder.check_still_there()
        self._save(self.best, loop, evaluated_statistics)
        with self.timeline.section(Section.CHECKPOINT):
            try:
                self.best.wait()
            except UserError as error:
                self._console.warn(f"the best state could not be saved ({disk_reason(error)}); the one before remains")
                return False
        return True

    def wait_until_saved(self) -> None:
        """Waits for the last checkpoint; raises UserError if it, or the folder of the run, could not be kept."""
        try:
            self.checkpoints.wait()
        except UserError:
            self._run.folder.check_still_there()
            raise

    def _save(self, checkpoints: Checkpoints, loop: Loop, evaluated_statistics: Callable[[TrainState], Any]) -> None:
        with self.timeline.section(Section.CHECKPOINT):
            progress = loop.progress
            progress.images_per_sec = self._images_per_sec(progress)
            progress.share_skipped()
            stored = dataclasses.asdict(progress) | self._totals() | {"step": loop.step}
            checkpoints.save(loop.step, loop.state, stored, evaluated_statistics(loop.state))

    def load_best(self, loop: Loop) -> None:
        """Replaces the state of a finished run by its best one, if it has chosen one."""
        best = loop.progress.best
        if self.best is None or best is None or best["step"] == loop.step:
            return
        with self.timeline.section(Section.CHECKPOINT):
            loop.state = None  # type: ignore[assignment]  # frees its memory
            loop.state, _ = self.best.restore(self._run.program.factory.abstract)

    def close_epoch(self, step: int) -> None:
        """Accounts for the epoch, or the part of one, that ends here."""
        with self.timeline.section(Section.PROFILER):
            record = self.profiler.end_epoch(step)
            if record is None or not self._writes:
                return
            self.log(step, GROUP, epoch_metrics(record))
            for line in epoch_summary(record):
                self._console.line(line)
            for note in self.profiler.new_notes():
                self._console.line(f"  note: {note}")
            for bottleneck in record.bottlenecks:
                if bottleneck["warning"]:
                    self._console.warn(bottleneck["message"])
            with self.optional(self._run.folder.profile):
                self.profiler.write(self._run.folder.profile)

    def close_trace(self) -> None:
        """Ends the trace that the user asked for, if it is being recorded."""
        with self.optional(self._run.folder.path / "trace"):
            self.trace.close()

    def note_skipped(self, loop: Loop, names: Iterable[str]) -> None:
        """Warns of unreadable images that others stand in for; names and counts each of them once."""
        seen = loop.progress.skipped_images
        for name in sorted(set(names) - set(seen)):
            seen.append(name)
            self._console.warn(f"{name}: unreadable, another image stands in for it ({len(seen)} so far)")

    def in_words(self) -> str:
        """Returns loss, rate and speed of the newest step; "" before the first one of this session."""
        if not self._newest:
            return ""
        words, speed = f"loss {self._newest['loss']:.4g}  lr {self._newest['lr']:.2e}", self._speed.since("run")
        if speed["images_per_sec"] is None:
            return words
        return f"{words}  {speed['images_per_sec']:,.0f} img/s  data wait {speed['data_wait_percent']:.0f} %"

    def show_training(self, loop: Loop) -> None:
        """Shows the progress bar of training."""
        self._console.start("train", self._length.total_steps, loop.step)

    def start(self, what: str, total: int, /) -> None:
        """Shows the progress bar of an evaluator."""
        self.agree_on_signals()
        self._console.start(what, total)

    def advance(self, amount: int, /) -> None:
        """Advances the progress bar of an evaluator."""
        self._console.advance(amount)
        self.raise_if_interrupted()

    # The end.

    def leave_summary(self, status: str, loop: Loop, **more: Any) -> dict[str, Any]:
        """Writes summary, profile and report of a run, finished or not; returns the summary."""
        self._console.stop()
        progress = loop.progress
        progress.share_skipped()
        summary = {
            "status": status,
            **({"init_from": start} if (start := getattr(self._config.model, "init_from", "")) else {}),
            **dict.fromkeys(f"untrained_{name}" for name in ("probe_accuracy", SELECTION_KEY, "knn_accuracy")),
            **progress.untrained_figures(),
            "images_per_sec": self._images_per_sec(progress),
            **self._totals(),
            "steps": loop.step,
            "epochs": loop.step / self._length.steps_per_epoch,
            "peak_memory_bytes": peak_memory_bytes(),
            "compilations": self._train_step.count,
            "collapse_warning": progress.warnings.get("collapse"),
            "skipped_images": len(progress.skipped_images),
            "host_seconds": self.timeline.seconds(),
            "num_classes": len(self._run.sources[0].classes),
            "data_identity": dict(zip(("train", "test"), map(fingerprint, self._run.sources), strict=True)),
            "baselines": measured_baselines(self._config.data.source),
            **progress.choice(self._config.train.keep_best),
            **(dict.fromkeys(FINAL_FIGURES) if status == "finished" else {}),
            **more,
        }
        self.close_epoch(loop.step)  # a run that did not get to the end of one
        if self._writes:
            self.optional.write_results(summary, self.profiler, self._run.hooks.write_report)
        return summary

    def _totals(self) -> dict[str, float]:
        """Returns wall seconds, and CPU seconds of all processes."""
        totals = self._usage.totals()
        return totals | {"cpu_seconds": sum_over_processes(totals["cpu_seconds"])}

    def _images_per_sec(self, progress: Progress) -> float | None:
        return self._speed.since("run")["images_per_sec"] or progress.images_per_sec
