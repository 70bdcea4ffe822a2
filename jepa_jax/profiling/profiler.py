"""The profiler of a run: watches the training loop, accounts for each epoch and writes profile.json.

The loop reports what it does; the profiler never makes it wait for the device, except around a recording of two steps
every few epochs. `NullProfiler` takes its place when it is switched off.
"""

import dataclasses
import math
import pathlib
import statistics
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jepa_jax.base.files import read_json_or_empty, write_json
from jepa_jax.config.groups import ProfileConfig
from jepa_jax.profiling.accounting import DeviceClock, Ledger
from jepa_jax.profiling.bottlenecks import Setting, find_bottlenecks
from jepa_jax.profiling.compilations import CompiledStep
from jepa_jax.profiling.epoch_record import Block, EpochRecord, Observed, make_record
from jepa_jax.profiling.monitor import Monitor
from jepa_jax.profiling.sections import EpochSection, Section, Timeline
from jepa_jax.profiling.speed import peak_flops
from jepa_jax.profiling.trace import PhaseRecorder, TraceWindow

WRITE_EVERY = 1000  # profile.json is written again after this many times the time that writing it took
SETTLING_STEPS = 200  # after which memory is watched, unless an epoch is shorter
PEAK_SECONDS = 60.0  # between two measurements of a CPU's peak, which take 50 ms
BLOCKS = 4  # that the steps of an epoch are divided into, so that two runs can be compared with an interval
# Watching the device costs about 0.15 ms per step. All steps are watched if they take LONG_STEP seconds; of shorter
# ones WATCHED in a row, at the beginning of each block and then so often that it takes 0.2 % of the time.
WATCHED, LONG_STEP = 8, 0.075


class NullProfiler:
    """The profiler that is switched off: accepts every call and does nothing."""

    def __init__(self, timeline: Timeline):
        self._timeline = timeline

    def start(self, step: Callable[[], int], path: pathlib.Path) -> None:
        """Starts watching; `step` returns the number of dispatched steps, `path` is profile.json of a resumed run."""

    def start_loop(self) -> None:
        """Reports that the first batch is about to be asked for; the time before it is start-up."""

    def dispatched(self, began: float, result: jax.Array, info: Mapping[str, Any] | None) -> None:
        """Reports a step that was handed to the device by a call that began at `began`.

        `info` is what the pipeline reports of its batch, if it does.
        """

    def recompiled(self) -> None:
        """Reports that the training step was compiled again."""

    def step_done(self, step: int) -> None:
        """Reports that the loop has gone round once more."""

    def must_drain(self, step: int) -> bool:
        """Returns whether the device must be idle after this step, because `record` is to be called."""
        return False

    def record(self, step: int) -> None:
        """Starts or ends a short recording."""

    def waited_for_data(self) -> float:
        """Returns the seconds until now that went into waiting for data."""
        return self._timeline.seconds().get(Section.DATA_WAIT, 0.0)

    def end_epoch(self, step: int) -> EpochRecord | None:
        """Returns the record of the epoch, or of the part of one, that ends here; None if it has no steps."""
        return None

    def new_notes(self) -> list[str]:
        """Returns the notes that have not been returned before."""
        return []

    def write(self, path: pathlib.Path, *, at_end: bool = False) -> None:
        """Writes profile.json, at the end of the run or if that is cheap compared to the time since the last time."""

    def close(self) -> None:
        """Ends threads and recordings."""


class Profiler(NullProfiler):
    """The profiler of one process."""

    def __init__(
        self,
        options: ProfileConfig,
        setting: Setting,
        timeline: Timeline,
        kept_trace: TraceWindow,
        compiled: CompiledStep,
        *,
        steps_per_epoch: int,
        total_steps: int = sys.maxsize,
    ):
        super().__init__(timeline)
        self._options, self._setting, self._compiled = options, setting, compiled
        self._steps_per_epoch, self._total_steps = steps_per_epoch, total_steps
        self._device = DeviceClock(timeline.clock)
        self._ledger = Ledger(timeline, self._device.take)
        self._recorder = PhaseRecorder(options.trace_every_epochs, kept_trace, compiled, timeline.clock)
        self.monitor = Monitor(options.monitor_seconds, clock=timeline.clock)
        self._start = self._epoch_start = 0  # steps at which this session and this epoch begin
        self._first_epoch: int | None = None  # of this session
        self._rows: list[dict[str, Any]] = []  # of its epochs
        self._earlier: list[dict[str, Any]] = []  # epochs of the sessions before this one
        self._outside: dict[str, dict[Section, float]] = {}  # start-up and end
        self._shown: set[str] = set()
        self._batch_mark = 0.0
        self._watching, self._watch_every, self._in_block = True, WATCHED, 0
        self._flops_mark = 0, 0  # steps and their operations before this epoch
        self._written = self._write_seconds = 0.0
        self._peak: tuple[float | None, str] = (None, "")
        self._peak_at = 0.0
        self._seen = Observed()

    def start(self, step: Callable[[], int], path: pathlib.Path) -> None:
        self._start = self._epoch_start = step()
        self._earlier = epochs_until(path, self._start)
        self._recorder.plan(self._start, self._epoch_end())
        self._peak_flops()
        self.monitor.start(step)
        if self.monitor.gpu_problem and jax.default_backend() == "gpu":
            self._recorder.notes.append(f"no temperature, power or clock of a GPU: {self.monitor.gpu_problem}")

    def close(self) -> None:
        self._recorder.close()
        self.monitor.close()
        self._device.close()

    def start_loop(self) -> None:
        self._outside["start"] = self._cut_time()
        self._batch_mark = self._timeline.step_seconds()
        if self.must_drain(self._start):
            self.record(self._start)

    def dispatched(self, began: float, result: jax.Array, info: Mapping[str, Any] | None) -> None:
        if info is not None:
            self._seen.add_batch(info)
        watch = self._in_block % self._watch_every < WATCHED
        self._in_block += 1
        if watch or self._watching:
            self._device.dispatched(began, result)
        if watch != self._watching:  # after the dispatch: the device is busy from the first moment on
            self._watching = watch
            (self._ledger.watch if watch else self._ledger.rest)()

    def recompiled(self) -> None:
        self._seen.compilations += 1

    def step_done(self, step: int) -> None:
        now = self._timeline.step_seconds()
        self._seen.batch_seconds.append(now - self._batch_mark)
        self._batch_mark = now
        done, whole = step - self._epoch_start, self._epoch_end() - self._epoch_start
        if done * BLOCKS // whole > len(self._seen.blocks):
            self._close_block()

    def must_drain(self, step: int) -> bool:
        return self._recorder.due(step)

    def record(self, step: int) -> None:
        with self._timeline.section(Section.PROFILER):
            self._seen.traced |= self._recorder.run(step)

    def waited_for_data(self) -> float:
        return self._ledger.update().exposed.get(Section.DATA_WAIT, 0.0)

    def end_epoch(self, step: int) -> EpochRecord | None:
        if step == self._epoch_start:
            return None
        self._close_block()
        newest = self._recorder.newest
        record = make_record(
            self._seen,
            epoch=math.ceil(step / self._steps_per_epoch),
            last_step=step,
            shares=newest.phases if newest else None,
            batch_size=self._setting.batch_size,
            flops_per_step=self._epoch_flops(),
            peak_flops=self._peak_flops(),
            samples=self.monitor.take(),
        )
        # Memory grows while a run settles: caches fill, the first evaluation allocates.
        settled = self._start + min(self._steps_per_epoch, SETTLING_STEPS)
        history = [sample for sample in self.monitor.history() if sample["step"] > settled]
        found = find_bottlenecks(record, self._setting, history)
        before = {one["name"] for row in (*self._earlier, *self._rows) for one in row["bottlenecks"]}
        rows = [dataclasses.asdict(bottleneck) | {"first": bottleneck.name not in before} for bottleneck in found]
        record = dataclasses.replace(record, bottlenecks=rows)
        self._rows.append(dataclasses.asdict(record))
        self._first_epoch = self._first_epoch or record.epoch
        self._seen, self._epoch_start = Observed(), step
        self._batch_mark = self._timeline.step_seconds()
        done = record.epoch - self._first_epoch + 1
        self._recorder.plan(step, self._epoch_end(), epochs_done=done, elapsed=self._ledger.total.seconds)
        return record

    def new_notes(self) -> list[str]:
        new = [note for note in dict.fromkeys(self._recorder.notes) if note not in self._shown]
        self._shown.update(new)
        return new

    def _epoch_end(self) -> int:
        """Returns the step at which this epoch, or this run, will end."""
        whole, total = self._steps_per_epoch, self._total_steps
        return max(min((self._epoch_start // whole + 1) * whole, total), self._epoch_start + 1)

    def _close_block(self) -> None:
        seconds, self._seen.batch_seconds, self._in_block = self._seen.batch_seconds, [], 0
        self._seen.blocks.append(Block(len(seconds), self._ledger.cut(), seconds))
        if seconds:
            self._watch_every = math.ceil(WATCHED * max(1.0, LONG_STEP / max(statistics.fmean(seconds), 1e-6)))

    def _cut_time(self) -> dict[Section, float]:
        """Returns the host time since the last account and starts a new one."""
        return {section: value for section, value in self._ledger.cut().host.items() if value > 0}

    def _epoch_flops(self) -> float | None:
        """Returns the mean operations of the steps since the last account: steps of several sizes differ in them."""
        steps, flops = self._compiled.calls, self._compiled.total_flops
        before, self._flops_mark = self._flops_mark, (steps, flops)
        return (flops - before[1]) / (steps - before[0]) if steps > before[0] else None

    def _peak_flops(self) -> float | None:
        """Returns the peak of the devices; that of a CPU is measured now and then, and the best one counts."""
        now = self._timeline.clock()
        if not self._peak[1] or (self._setting.platform == "cpu" and now - self._peak_at > PEAK_SECONDS):
            found = peak_flops(self._options.peak_tflops, self._setting.precision)
            self._peak = max(found, self._peak, key=lambda known: known[0] or 0.0)
            self._peak_at = now
        return self._peak[0]

    def summary(self) -> dict[str, Any]:
        """Returns the content of profile.json."""
        newest, notes = self._recorder.newest, self._recorder.notes
        return {
            "sections": list(EpochSection),
            "batch_size": self._setting.batch_size,
            "steps_per_epoch": self._steps_per_epoch,
            "setting": dataclasses.asdict(self._setting),
            "devices": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
            "flops_per_step": self._compiled.flops,
            "peak_flops_per_second": self._peak[0],
            "peak_from": self._peak[1],
            "profiler_seconds": {
                "recordings": self._recorder.seconds,
                "all": self._timeline.seconds().get(Section.PROFILER, 0.0),
            },
            "outside_epochs": self._outside,
            "epochs": [*self._earlier, *self._rows],
            "device": dataclasses.asdict(newest) if newest else None,
            "samples": self.monitor.history(),
            "notes": list(dict.fromkeys(notes)),
        }

    def write(self, path: pathlib.Path, *, at_end: bool = False) -> None:
        began = self._timeline.clock()
        if at_end:
            self._outside["end"] = self._cut_time()
        if at_end or began - self._written > WRITE_EVERY * self._write_seconds:
            write_json(path, self.summary())
            self._written = self._timeline.clock()
            self._write_seconds = self._written - began


def epochs_until(path: pathlib.Path, step: int) -> list[dict[str, Any]]:
    """Returns the epochs that an earlier session of this run has recorded, up to the step it resumes from.

    What is damaged is dropped: a profile must not keep a run from going on.
    """
    epochs = read_json_or_empty(path).get("epochs")
    return [row for row in epochs if _is_epoch(row) and row["last_step"] <= step] if isinstance(epochs, list) else []


def _is_epoch(row: Any) -> bool:
    """Returns whether a row has what a session reads of those before it."""
    if not isinstance(row, dict) or not isinstance(row.get("last_step"), int):
        return False
    found = row.get("bottlenecks")
    return isinstance(found, list) and all(isinstance(one, dict) and isinstance(one.get("name"), str) for one in found)
