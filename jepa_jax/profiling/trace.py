"""Recordings of a few steps: one for people to look at, and short ones that split the device's time by phase."""

import contextlib
import pathlib
import tempfile
from collections.abc import Callable
from typing import Any

import jax

from jepa_jax.profiling.compilations import CompiledStep
from jepa_jax.profiling.device_time import DeviceTime, NoDevicePlanes, read_device_time
from jepa_jax.profiling.sections import Timeline

WARM_UP = 2  # steps of an epoch before its short recording
LENGTH = 2  # steps of a short recording
BUDGET = 0.002  # of the run's time, that recordings after the first may take
NO_PLANES = (
    "a recording holds nothing of the {platform}, so its time is not split by phase: CUPTI could not be used; another "
    "profiler may be running, or the driver reserves it for administrators (NVreg_RestrictProfilingToAdminUsers=0)"
)
ATTRIBUTED = 0.8  # of the device's time; below it a note says that names are missing


class TraceWindow:
    """Records steps A to B of "A:B" (the first step is 0) into `directory`; an empty string records nothing.

    Viewers see each step from the wait for its batch to the next one, and the sections of the timeline inside it.
    """

    def __init__(self, steps: str, directory: pathlib.Path, timeline: Timeline, *, with_python: bool = False):
        """`with_python` also records every call of Python, which slows the steps down."""
        first, last = (int(part) for part in steps.split(":")) if steps else (-1, -1)
        self._first, self._last = first, max(first, last)
        self._directory, self._timeline, self._with_python = directory, timeline, with_python
        self._step: jax.profiler.StepTraceAnnotation | None = None  # that is under way
        self.recording = False

    def begins_at(self, step: int) -> bool:
        return step == self._first

    def start(self) -> None:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = int(self._with_python)
        jax.profiler.start_trace(str(self._directory), create_perfetto_trace=True, profiler_options=options)
        self.recording, self._timeline.annotate = True, jax.profiler.TraceAnnotation

    def begin_step(self, step: int) -> None:
        """Marks the end of the step before, and the beginning of this one."""
        self._end_step()
        self._step = jax.profiler.StepTraceAnnotation("train", step_num=step)
        self._step.__enter__()

    def completed(self, steps: int) -> None:
        """Reports that the metrics of this many steps have been read.

        A step lasts until the one before it is complete. The wait for the last one itself, at the end of the recording,
        would make it twice as long.
        """
        if steps == self._last:
            self._end_step()

    def _end_step(self) -> None:
        if self._step is not None:
            self._step.__exit__(None, None, None)
            self._step = None

    def ends_at(self, done: int) -> bool:
        return self.recording and done == self.end

    def overlaps(self, first: int, end: int) -> bool:
        """Returns whether it records any of the steps from `first` up to `end`."""
        return first <= self._last and end > self._first

    @property
    def end(self) -> int:
        return self._last + 1

    def close(self) -> None:
        if self.recording:
            self._end_step()
            self.recording, self._timeline.annotate = False, None
            jax.profiler.stop_trace()

    def how_to_open(self) -> str:
        """Returns a line that says where the trace is and how to look at it."""
        return (
            f"trace of steps {self._first} to {self._last} in {self._directory}; to look at it: "
            f"pip install 'jepa_jax[trace]' and tensorboard --logdir={self._directory}, tab Profile; "
            "or open its perfetto_trace.json.gz at https://ui.perfetto.dev"
        )


def short_window(start: int, epoch_end: int, kept: TraceWindow) -> range | None:
    """Returns the steps to record of an epoch from step `start` to `epoch_end`, outside the trace that people want."""
    first = start + min(WARM_UP, max(0, epoch_end - start - LENGTH))
    end = min(first + LENGTH, epoch_end)
    if kept.overlaps(first, end):
        first, end = kept.end, min(kept.end + LENGTH, epoch_end)
    return range(first, end) if end > first else None


class ShortTrace:
    """A recording of device operations only, in a temporary folder."""

    def __init__(self) -> None:
        self._folder: tempfile.TemporaryDirectory | None = None

    @property
    def recording(self) -> bool:
        return self._folder is not None

    def start(self) -> None:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        options.host_tracer_level = 1
        options.enable_hlo_proto = False  # the compiled program is at hand
        folder = tempfile.TemporaryDirectory(prefix="jepa_jax_trace_")
        try:
            jax.profiler.start_trace(folder.name, profiler_options=options)
        except BaseException:
            folder.cleanup()
            raise
        self._folder = folder

    def stop(self) -> Any:
        """Ends the recording and returns it as `jax.profiler.ProfileData`."""
        folder, self._folder = self._folder, None
        assert folder is not None
        with folder:
            jax.profiler.stop_trace()
            newest = max(pathlib.Path(folder.name).rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
            return jax.profiler.ProfileData.from_serialized_xspace(newest.read_bytes())

    def close(self) -> None:
        if self.recording:
            self.stop()


class PhaseRecorder:
    """Records two steps every few epochs; a backend that cannot record costs a note, not the run."""

    def __init__(self, every_epochs: int, kept: TraceWindow, compiled: CompiledStep, clock: Callable[[], float]):
        self._every, self._kept, self._compiled, self._clock = every_epochs, kept, compiled, clock
        self._trace = ShortTrace()
        self._window: range | None = None  # of steps
        self._last_seconds = 0.0
        self.seconds = 0.0  # that recordings have taken
        self.newest: DeviceTime | None = None
        self.notes: list[str] = []

    def plan(self, start: int, end: int, *, epochs_done: int = 0, elapsed: float = 0.0) -> None:
        """Chooses steps of the epoch from `start` to `end`, if it is its turn and the budget allows."""
        affordable = self.newest is None or self.seconds + self._last_seconds <= BUDGET * elapsed
        due = self._every and epochs_done % self._every == 0 and affordable
        self._window = short_window(start, end, self._kept) if due else None

    def due(self, step: int) -> bool:
        """Returns whether a recording starts or ends after `step` steps; the device must be idle then."""
        return self._window is not None and step in (self._window.start, self._window.stop)

    def run(self, step: int) -> bool:
        """Starts or ends the recording; returns whether it has split the device's time."""
        assert self._window is not None
        began, split = self._clock(), False
        try:
            if step == self._window.start and not self._trace.recording:
                self._trace.start()
            elif self._trace.recording:
                self._last_seconds = 0.0
                split = self._read(self._trace.stop(), len(self._window))
                self._window = None
        except Exception as error:  # whatever the profiler of this backend does, the run goes on
            self._window = None
            self.notes.append(f"step {step}: no device timeline ({type(error).__name__}: {error})")
        spent = self._clock() - began
        self._last_seconds += spent
        self.seconds += spent
        return split

    def _read(self, profile: Any, steps: int) -> bool:
        if not self._compiled.were_alike(steps):
            self.notes.append("the recorded steps had batches of different sizes; a later recording splits their time")
            return False
        platform = jax.default_backend()
        try:
            newest = read_device_time(profile, self._compiled.text(), steps=steps, platform=platform)
        except NoDevicePlanes:
            self.notes.append(NO_PLANES.format(platform=platform))
            return False
        if newest is None:
            self.notes.append("a recording did not contain the training step; the device's time is not split by phase")
            return False
        if newest.attributed < ATTRIBUTED and not self.newest:
            self.notes.append(
                f"{100 * (1 - newest.attributed):.0f} % of the device's time carries no name; on GPUs command buffers "
                "hide names: XLA_FLAGS=--xla_gpu_enable_command_buffer= shows them"
            )
        self.newest = newest
        return True

    def close(self) -> None:
        with contextlib.suppress(Exception):  # as in `run`
            self._trace.close()
