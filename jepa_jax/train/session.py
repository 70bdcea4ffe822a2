"""The bookkeeping of a run between its first and its last step: clocks, writers, checkpoints, progress bar, summary."""

import collections
import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

from jepa_jax.base.console import Console
from jepa_jax.base.errors import Collapsed, Diverged
from jepa_jax.base.files import write_atomically, write_json
from jepa_jax.base.signals import InterruptFlag
from jepa_jax.data.pictures import png, view_grid
from jepa_jax.evals.collapse import collapse_warning
from jepa_jax.profiling.compilations import CompilationCounter, CompiledStep
from jepa_jax.profiling.metrics import GROUP, epoch_metrics, epoch_summary
from jepa_jax.profiling.profiler import Profiler
from jepa_jax.profiling.speed import Speedometer, Usage, peak_memory_bytes
from jepa_jax.profiling.timers import Timeline
from jepa_jax.profiling.trace import TraceWindow
from jepa_jax.program.build import Length, Program
from jepa_jax.program.checkpoint import Checkpoints
from jepa_jax.program.step import TrainState
from jepa_jax.program.workdir import Workdir
from jepa_jax.reports.run_report import write_report
from jepa_jax.train.writers import open_writers


class Session:
    """One process's part of a run; a `with` opens and closes everything it writes to.

    Several processes compute the same run: the first of them writes, the others only compute and save their shards.
    """

    def __init__(
        self,
        config: Any,
        folder: Workdir,
        length: Length,
        console: Console,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.config, self.folder, self.length, self.console = config, folder, length, console
        self.writes = jax.process_index() == 0
        self.timeline = Timeline(clock, keep_segments=config.profile.enabled)
        self.profiler: Profiler | None = None
        self.speed = Speedometer(self.timeline, config.data.batch_size, self._waited_for_data)
        self.interrupt = InterruptFlag()
        self.trace = TraceWindow(config.profile.trace_steps, folder.path / "trace")
        self._pending: collections.deque = collections.deque()  # steps whose metrics are still on the device
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "Session":
        enter = self._stack.enter_context
        self._stack.callback(self.console.stop)
        self._stack.callback(self.trace.close)
        enter(self.interrupt)
        # Also what evaluations compile is compilation.
        enter(CompilationCounter(lambda seconds: self.timeline.move("compile", seconds)))
        self.checkpoints = enter(Checkpoints(self.folder.checkpoints, self.config.train.checkpoint_keep))
        return self

    def __exit__(self, *exc: Any) -> None:
        self._stack.close()

    def restore_or(self, create: Callable[[], TrainState], program: Program) -> TrainState:
        """The state of the newest checkpoint, or a new one; from here on `progress` and the writers are open."""
        self.progress: dict[str, Any] = {
            "step": 0,
            "wall_seconds": 0.0,
            "cpu_seconds": 0.0,
            "images_per_sec": None,
            "skipped_images": [],
            "untrained_probe_accuracy": None,
            "untrained_knn_accuracy": None,
            "ended_epoch": 0,
            "initial_spread": None,
            "collapse_warning": None,
        }
        if self.checkpoints.latest_step() is None:
            state = create()
        else:
            state, self.progress = self.checkpoints.restore(program.factory.abstract)
            self.console.line(
                f"resumed at step {self.progress['step']} of {self.length.total_steps} in {self.folder.path}"
            )
        self.usage = Usage(self.progress["wall_seconds"], self.progress["cpu_seconds"])
        writers = open_writers(self.folder, self.config, self.progress["step"]) if self.writes else []
        self._writers = [self._stack.enter_context(writer) for writer in writers]
        self.train_step = CompiledStep(program.train_step)
        if self.config.profile.enabled:
            self._start_profiler()
        return state

    def _start_profiler(self) -> None:
        profiler = Profiler(self.config, self.length, self.timeline, self.trace, start_step=self.progress["step"])
        profiler.compiled = self.train_step
        profiler.continue_from(self.folder.profile)
        self.profiler = self._stack.enter_context(profiler)

    def _waited_for_data(self) -> float:
        """Seconds in which the device waited for data or, without a profiler, the host."""
        if self.profiler is not None:
            return self.profiler.waited_for_data()
        return self.timeline.seconds().get("data_wait", 0.0)

    def log(self, step: int, group: str, values: dict[str, Any]) -> None:
        row = {f"{group}/{name}": value for name, value in values.items()}
        for writer in self._writers:
            writer.write(step, {"epoch": step / self.length.steps_per_epoch, "time": self.usage.wall_seconds(), **row})

    def dispatch(self, step: int, state: TrainState, batch: dict[str, jax.Array], info: dict[str, Any]) -> TrainState:
        """Hands step number `step` to the device, compiling it first if need be; its metrics will be read later."""
        if not self.train_step.is_ready_for(batch):
            with self.timeline.section("compile"):
                self.train_step.compile(state, batch)
            if self.train_step.count > 1:
                self.console.warn(f"step {step}: the training step was compiled again; did a shape change?")
                if self.profiler is not None:
                    self.profiler.count("compilation")
        began = self.timeline.clock()
        with self.timeline.section("dispatch"), self.trace.marking(step):
            state, metrics = self.train_step(state, batch)
        if self.profiler is not None:
            self.profiler.dispatched(step, began, metrics, info)
        self._pending.append((step, metrics))
        self.on_skipped(info["skipped"])
        return state

    def start_loop(self) -> None:
        """The first batch is about to be asked for: the first epoch begins."""
        if self.profiler is not None:
            self.profiler.start_loop()

    def before_step(self, step: int) -> None:
        """Step number `step`, counted from 0, is about to be asked for."""
        if self.trace.starts_at(step):
            with self.timeline.section("profiler"):
                self.trace.start()

    def wants_quiet(self, step: int) -> bool:
        """Whether something looks at the device after `step` steps, so that none may be under way."""
        recording = self.profiler is not None and self.profiler.wants_quiet(step)
        return bool(recording or self.interrupt.raised or self.trace.ends_at(step))

    def after_step(self, step: int) -> None:
        """Recordings start and end between two steps; so does an interrupted run."""
        if self.trace.ends_at(step):
            with self.timeline.section("profiler"):
                self.trace.close()
            self.console.line(self.trace.how_to_open())
        if self.profiler is not None:
            self.profiler.at_step(step)
        self.interrupt.check()

    def close_epoch(self, step: int) -> None:
        """The account of the epoch that ends here, or of the part of one that was computed."""
        if self.profiler is None or not self.profiler.steps_since_epoch:
            return
        with self.timeline.section("profiler"):
            record = self.profiler.end_epoch(math.ceil(step / self.length.steps_per_epoch))
            if not self.writes:
                return
            self.log(step, GROUP, epoch_metrics(record))
            for line in epoch_summary(record):
                self.console.line(line)
            for note in self.profiler.new_notes():
                self.console.line(f"  note: {note}")
            for bottleneck in record.bottlenecks:
                if bottleneck["warning"]:
                    self.console.warn(bottleneck["message"])
            self.profiler.write(self.folder.profile)

    def read_metrics(self, *, all_but: int) -> dict[str, float] | None:
        """Reads all but the newest steps; their figures go to the progress bar and the writers."""
        values = None
        while len(self._pending) > all_but:
            step, metrics = self._pending.popleft()
            with self.timeline.section("device_wait"):
                values = {name: float(value) for name, value in jax.device_get(metrics).items()}
            self._require_finite(step, values)
            self.speed.completed(step)
            with self.timeline.section("logging"):
                self.console.advance(1, functools.partial(bar_note, values, self.speed))
                if step % self.config.log.every_steps == 0 or step == self.length.total_steps:
                    self.log(step, "train", values)
                    self.log(step, "speed", self.speed.next_window())
        return values

    def _require_finite(self, step: int, values: dict[str, float]) -> None:
        """A loss, gradient or update that is not finite ends the run: later states are worth nothing."""
        if all(math.isfinite(values[name]) for name in ("loss", "grad_norm", "update_norm")):
            return
        self._pending.clear()
        terms = ", ".join(f"{name} {value:.4g}" for name, value in values.items())
        last = self.checkpoints.latest_step()
        good = "none yet" if last is None else f"step {last} in {self.folder.checkpoints}"
        raise Diverged(
            f"step {step}: the loss or its gradient is not finite ({terms}); last good checkpoint: {good}; "
            "in another --workdir, lower config.optim.lr, lengthen config.optim.warmup_epochs or set "
            "config.optim.clip_norm"
        )

    def watch_collapse(self, step: int, figures: dict[str, float]) -> None:
        """Logs how far features spread; warns, or ends the run, when they have collapsed."""
        self.log(step, "collapse", figures)
        if self.progress["initial_spread"] is None:
            self.progress["initial_spread"] = figures
            return
        warning = self.progress["collapse_warning"] = collapse_warning(figures, self.progress["initial_spread"])
        if warning is None:
            return
        if self.config.train.stop_on_collapse:
            raise Collapsed(f"step {step}: {warning}")
        self.console.warn(f"step {step}: {warning}")

    def draw(self, step: int, pictures: np.ndarray) -> None:
        """Pictures [V, B, h, w, 3] of what the model makes of images, as PNG and to the writers that show them."""
        if not self.writes:
            return
        augment = self.config.data.augment
        image = view_grid(pictures, augment.mean, augment.std)
        self.folder.pictures.mkdir(exist_ok=True)
        write_atomically(self.folder.pictures / f"step_{step:08d}.png", png(image))
        for writer in self._writers:
            writer.picture(step, "pictures", image)

    def save(self, step: int, state: TrainState) -> None:
        with self.timeline.section("checkpoint"):
            self.progress.update(self.usage.totals(), step=step, images_per_sec=self._images_per_sec())
            self.checkpoints.save(step, state, self.progress)

    def measure(self, what: str, images: int, step: int, figures: Callable[[], Any]) -> Any:
        """Runs an evaluation of so many images under its own progress bar, then shows that of training again."""
        with self.timeline.section("validation"):
            self.console.start(what, images)
            result = figures()
        self.console.start("train", self.length.total_steps, step)
        return result

    def on_skipped(self, names: Iterable[str]) -> None:
        """Unreadable images that others stood in for: each is named once and counted once."""
        seen = self.progress["skipped_images"]
        for name in sorted(set(names) - set(seen)):
            seen.append(name)
            self.console.warn(f"{name}: unreadable, another image stands in for it ({len(seen)} so far)")

    def on_images(self, count: int) -> None:
        """An evaluation has done so many images."""
        self.console.advance(count)
        self.interrupt.check()

    def leave_summary(self, status: str, step: int, **more: Any) -> dict[str, Any]:
        """The summary and the report of a run, finished or not."""
        summary = {
            "status": status,
            "untrained_probe_accuracy": self.progress["untrained_probe_accuracy"],
            "untrained_knn_accuracy": self.progress.get("untrained_knn_accuracy"),  # older runs had none
            "images_per_sec": self._images_per_sec(),
            **self.usage.totals(),
            "steps": step,
            "epochs": step / self.length.steps_per_epoch,
            "peak_memory_bytes": peak_memory_bytes(),
            "compilations": self.train_step.count,
            "collapse_warning": self.progress["collapse_warning"],
            "skipped_images": len(self.progress["skipped_images"]),
            "host_seconds": self.timeline.seconds(),
            **more,
        }
        self.close_epoch(step)  # a run that did not get to the end of one
        if self.writes:
            if self.profiler is not None:
                self.profiler.end(self.folder.profile)
            write_json(self.folder.summary, summary)
            write_report(self.folder.path)
        return summary

    def _images_per_sec(self) -> float | None:
        return self.speed.since("run")["images_per_sec"] or self.progress["images_per_sec"]


def bar_note(values: dict[str, float], speed: Speedometer) -> str:
    """The text beside the progress bar."""
    note = f"loss {values['loss']:.4g}  lr {values['lr']:.2e}"
    figures = speed.since("run")
    if figures["images_per_sec"] is not None:
        note += f"  {figures['images_per_sec']:,.0f} img/s  data wait {figures['data_wait_percent']:.0f} %"
    return note
