"""The profiler of a run: watches the loop, closes an account at the end of each epoch, leaves profile.json.

The loop tells it what happens (`at_step`, `dispatched`, `end_epoch`); it never makes the loop wait for the device,
except around a short recording of two steps now and then.
"""

import dataclasses
import json
import os
import pathlib
from typing import Any

import jax

from jepa_jax.base.files import write_json
from jepa_jax.profiling import peak, trace
from jepa_jax.profiling.accounting import SECTIONS, Ledger, Spent
from jepa_jax.profiling.bottlenecks import Setting, as_rows, find_bottlenecks
from jepa_jax.profiling.compilations import CompiledStep
from jepa_jax.profiling.device_clock import DeviceClock
from jepa_jax.profiling.device_time import DeviceTime, device_time, instruction_names, module_name, traced_ops
from jepa_jax.profiling.monitor import Monitor
from jepa_jax.profiling.record import Block, EpochRecord, Loading, make_record
from jepa_jax.profiling.timers import Timeline
from jepa_jax.program.build import Length

WRITE_EVERY = 500  # times longer between two profile.json than writing one takes
SETTLING_STEPS = 200  # after which memory is watched, if an epoch is not shorter
BLOCKS = 4  # that the steps of an epoch are divided into, so that two runs can be compared with an interval


class Profiler:
    """Of one process; `with` starts and ends its threads."""

    def __init__(
        self, config: Any, length: Length, timeline: Timeline, kept_trace: trace.TraceWindow, *, start_step: int = 0
    ):
        self._config, self._length, self._timeline, self._kept_trace = config, length, timeline, kept_trace
        self._step = self._epoch_start = self._start_step = start_step
        self._device = DeviceClock(timeline.clock)
        self._ledger = Ledger(timeline, self._device.take)
        self.monitor = Monitor(config.profile.monitor_seconds, step=lambda: self._step, clock=timeline.clock)
        self._trace, self._window = trace.ShortTrace(), self._next_window()
        self._names: tuple[int, dict[str, str]] = (0, {})  # of the instructions of the n-th compiled program
        self._trace_seconds = self._last_trace_seconds = 0.0
        self._newest: DeviceTime | None = None
        self.compiled: CompiledStep | None = None
        self.records: list[EpochRecord] = []
        self.earlier: list[dict[str, Any]] = []  # epochs of the sessions before this one
        self.notes: list[str] = []
        self._shown: set[str] = set()
        self.outside: dict[str, dict[str, float]] = {}
        self._marked, self._batch_mark = Spent(), 0.0
        self._written = self._write_seconds = 0.0
        self._peak: tuple[float | None, str] | None = None
        self._loading = Loading()
        self._counts: dict[str, int] = {}
        self._begin_epoch()

    def __enter__(self) -> "Profiler":
        self.monitor.start()
        if self.monitor.gpu_problem:
            self.notes.append(f"no temperature, power or clock of a GPU: {self.monitor.gpu_problem}")
        return self

    def __exit__(self, *exc: object) -> None:
        self._trace.close()
        self.monitor.close()
        self._device.close()

    # What the loop reports.

    def start_loop(self) -> None:
        """The first batch is about to be asked for; what came before is start-up."""
        self.outside["start"] = self._cut_time()
        self._batch_mark = self._timeline.step_seconds()
        self.at_step(self._step)

    def dispatched(self, step: int, began: float, metrics: dict[str, jax.Array], info: dict[str, Any]) -> None:
        """Step `step` has been handed to the device, by a call that began at `began`."""
        self._device.dispatched(began, metrics["loss"])
        self._step = step
        self._loading = self._loading.plus(info)

    def wants_quiet(self, step: int) -> bool:
        """Whether a recording starts or ends after `step` steps: nothing may be under way then."""
        return self._window is not None and step in (self._window.first, self._window.end)

    def at_step(self, step: int) -> None:
        """So many steps have been dispatched, and their metrics read as far as the loop reads them."""
        if step > self._epoch_start:
            now = self._timeline.step_seconds()
            self._batch_seconds.append(now - self._batch_mark)
            self._batch_mark = now
        if self.wants_quiet(step):
            with self._timeline.section("profiler"):
                self._record_or_read(step)
        done = step - self._epoch_start
        if done * BLOCKS // self._epoch_steps() > len(self._blocks):
            self._close_block()

    def count(self, what: str) -> None:
        """Something that is only counted has happened in this epoch: another "compilation" of the step."""
        self._counts[what] = self._counts.get(what, 0) + 1

    def waited_for_data(self) -> float:
        """Seconds so far in which the device had nothing to do for want of data."""
        return self._ledger.update().exposed.get("data_wait", 0.0)

    def end_epoch(self, epoch: int) -> EpochRecord:
        """Closes the account of the epoch, and of a part of one where a run ends."""
        self._close_block()
        samples = self.monitor.take()
        record = make_record(
            epoch=epoch,
            last_step=self._step,
            blocks=self._blocks,
            shares=self._newest.phases if self._newest else None,
            traced=self._traced,
            loading=self._loading,
            counts=self._counts,
            batch_size=self._config.data.batch_size,
            flops_per_step=self.compiled.flops if self.compiled else None,
            peak_flops=self._peak_flops(),
            samples=samples,
        )
        # Memory grows while a run settles: caches fill, the first evaluation allocates.
        settled = self._start_step + min(self._length.steps_per_epoch, SETTLING_STEPS)
        history = [sample for sample in self.monitor.history() if sample["step"] > settled]
        found = find_bottlenecks(record, self._setting(), history)
        record = dataclasses.replace(record, bottlenecks=as_rows(found))
        self.records.append(record)
        self._epoch_start = self._step
        self._begin_epoch()
        self._batch_mark = self._timeline.step_seconds()
        self._window = self._next_window() if self._trace_is_due(epoch) else None
        return record

    def new_notes(self) -> list[str]:
        """Notes that have not been shown yet."""
        new = [note for note in dict.fromkeys(self.notes) if note not in self._shown]
        self._shown.update(new)
        return new

    @property
    def steps_since_epoch(self) -> int:
        return self._step - self._epoch_start

    # What it does with it.

    def _begin_epoch(self) -> None:
        self._blocks: list[Block] = []
        self._batch_seconds: list[float] = []
        self._loading = Loading()
        self._counts = {}
        self._traced = False

    def _epoch_steps(self) -> int:
        """Steps of this epoch that this session will have taken when it ends."""
        whole, total = self._length.steps_per_epoch, self._length.total_steps
        end = min((self._epoch_start // whole + 1) * whole, total)
        return max(end - self._epoch_start, 1)

    def _close_block(self) -> None:
        total = self._ledger.update()
        steps = len(self._batch_seconds)
        self._blocks.append(Block(steps, total - self._marked, self._batch_seconds))
        self._marked, self._batch_seconds = total, []

    def _cut_time(self) -> dict[str, float]:
        total = self._ledger.update()
        spent, self._marked = total - self._marked, total
        return {name: value for name, value in spent.host.items() if value > 0}

    def _next_window(self) -> trace.ShortWindow | None:
        if self._config.profile.trace_every_epochs == 0:
            return None
        return trace.short_window(self._epoch_start, self._epoch_start + self._epoch_steps(), self._kept_trace)

    def _trace_is_due(self, epoch: int) -> bool:
        """Each `trace_every_epochs`, as long as recordings stay within their budget; until one has worked, always."""
        every = self._config.profile.trace_every_epochs
        if every == 0 or (self.records and (epoch - self.records[0].epoch + 1) % every):
            return False
        elapsed = self._ledger.total.seconds
        return self._newest is None or self._trace_seconds + self._last_trace_seconds <= trace.BUDGET * elapsed

    def _record_or_read(self, step: int) -> None:
        """Starts the short recording, or stops it and reads it; a recorder that does not work costs a note."""
        assert self._window is not None
        began = self._timeline.clock()
        try:
            if step == self._window.first and not self._trace.recording:
                self._trace.start()
            elif self._trace.recording:
                self._last_trace_seconds = 0.0
                self._read(self._trace.stop(), self._window.end - self._window.first)
                self._window = None
        except Exception as error:  # whatever the profiler of this backend does, the run goes on
            self._window = None
            self.notes.append(f"step {step}: no device timeline ({type(error).__name__}: {error})")
        spent = self._timeline.clock() - began
        self._last_trace_seconds += spent
        self._trace_seconds += spent

    def _read(self, profile: Any, steps: int) -> None:
        if self.compiled is None:
            return
        if self._names[0] != self.compiled.count:
            self._names = self.compiled.count, instruction_names(self.compiled.text())
        newest = device_time(*traced_ops(profile, module_name(self.compiled.text()), steps), self._names[1])
        if newest is None:
            self.notes.append("a recording held nothing of the training step; the device's time stays whole")
            return
        if newest.attributed < 0.8 and not self._newest:
            self.notes.append(
                f"{100 * (1 - newest.attributed):.0f} % of the device's time carries no name; on GPUs command buffers "
                "hide names: XLA_FLAGS=--xla_gpu_enable_command_buffer= shows them"
            )
        self._newest, self._traced = newest, True

    def _setting(self) -> Setting:
        config = self._config
        return Setting(
            num_workers=config.data.num_workers,
            pipeline=config.data.pipeline,
            cores=os.cpu_count() or 1,
            platform=jax.default_backend(),
            precision=config.train.precision,
            batch_size=config.data.batch_size,
        )

    def _peak_flops(self) -> float | None:
        if self._peak is None:
            self._peak = peak.peak_flops(self._config.profile.peak_tflops, self._config.train.precision)
        return self._peak[0]

    # What it leaves.

    def summary(self) -> dict[str, Any]:
        """Everything that profile.json holds."""
        return {
            "sections": list(SECTIONS),
            "batch_size": self._config.data.batch_size,
            "steps_per_epoch": self._length.steps_per_epoch,
            "setting": dataclasses.asdict(self._setting()),
            "devices": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
            "flops_per_step": self.compiled.flops if self.compiled else None,
            "peak_flops_per_second": self._peak[0] if self._peak else None,
            "peak_from": self._peak[1] if self._peak else "",
            "profiler_seconds": {
                "recordings": self._trace_seconds,
                "all": self._timeline.seconds().get("profiler", 0.0),
            },
            "outside_epochs": self.outside,
            "epochs": [*self.earlier, *(dataclasses.asdict(record) for record in self.records)],
            "device": dataclasses.asdict(self._newest) if self._newest else None,
            "samples": self.monitor.history(),
            "notes": list(dict.fromkeys(self.notes)),
        }

    def write(self, path: pathlib.Path) -> None:
        """Writes profile.json, if that is cheap against the time since it was last written."""
        began = self._timeline.clock()
        if began - self._written > WRITE_EVERY * self._write_seconds:
            write_json(path, self.summary())
            self._written = self._timeline.clock()
            self._write_seconds = self._written - began

    def end(self, path: pathlib.Path) -> None:
        """Writes profile.json of the whole run."""
        self.outside["end"] = self._cut_time()
        write_json(path, self.summary())

    def continue_from(self, path: pathlib.Path) -> None:
        """Keeps the epochs that an earlier session of this run has recorded, up to the step it resumes from."""
        try:
            epochs = json.loads(path.read_text())["epochs"]
            self.earlier = [row for row in epochs if row["last_step"] <= self._step]
        except (OSError, ValueError, KeyError, TypeError):
            self.earlier = []
