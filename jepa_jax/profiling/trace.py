"""Recordings of a few steps: one for people to look at, and short ones for the profiler itself."""

import contextlib
import pathlib
import tempfile
from typing import Any

import jax

WARM_UP = 2  # steps of an epoch before its short recording
LENGTH = 2  # steps of a short recording


class TraceWindow:
    """Records steps A to B of "A:B" (the first step is 0) into `directory`; an empty string records nothing."""

    def __init__(self, steps: str, directory: pathlib.Path):
        first, last = (int(part) for part in steps.split(":")) if steps else (-1, -1)
        self._first, self._last = first, max(first, last)
        self._directory = directory
        self._recording = False

    def start_at(self, step: int) -> None:
        """Starts to record if this is the first of its steps."""
        if step == self._first:
            jax.profiler.start_trace(str(self._directory), create_perfetto_trace=True)
            self._recording = True

    def ends_at(self, done: int) -> bool:
        """Returns whether its last step is the last of `done` steps."""
        return self._recording and done == self.end

    def marking(self, step: int) -> contextlib.AbstractContextManager:
        """Marks the call of a step, so that viewers find its beginning and end."""
        if not self._recording:
            return contextlib.nullcontext()
        return jax.profiler.StepTraceAnnotation("train", step_num=step)

    def overlaps(self, first: int, end: int) -> bool:
        """Returns whether it records any of the steps from `first` up to `end`."""
        return first <= self._last and end > self._first

    @property
    def end(self) -> int:
        return self._last + 1

    def close(self) -> None:
        if self._recording:
            self._recording = False
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
