"""Short recordings of a run's own steps, which split the device's time by phase."""

from collections.abc import Callable
from typing import Any

from jepa_jax.profiling.compilations import CompiledStep
from jepa_jax.profiling.device_time import DeviceTime, device_time, instruction_names, module_name, traced_ops
from jepa_jax.profiling.trace import ShortTrace, TraceWindow, short_window

BUDGET = 0.004  # of the run's time, that recordings after the first may take
ATTRIBUTED = 0.8  # of the device's time; below it a note says that names are missing


class PhaseRecorder:
    """Records two steps every few epochs; a backend that cannot record costs a note, not the run."""

    def __init__(self, every_epochs: int, kept: TraceWindow, compiled: CompiledStep, clock: Callable[[], float]):
        self._every, self._kept, self._compiled, self._clock = every_epochs, kept, compiled, clock
        self._trace = ShortTrace()
        self._window: range | None = None  # of steps
        self._names: tuple[int, dict[str, str]] = (0, {})  # of the instructions of the n-th compiled program
        self._last_seconds = 0.0
        self.seconds = 0.0  # that recordings have taken
        self.newest: DeviceTime | None = None
        self.notes: list[str] = []

    def plan(self, start: int, end: int) -> None:
        """Chooses the steps to record of an epoch that goes from step `start` to `end`."""
        self._window = short_window(start, end, self._kept) if self._every else None

    def plan_next(self, start: int, end: int, *, epochs_done: int, elapsed: float) -> None:
        """Chooses the steps of the next epoch, if it is its turn and recordings stay within their budget."""
        affordable = self.newest is None or self.seconds + self._last_seconds <= BUDGET * elapsed
        if self._every and epochs_done % self._every == 0 and affordable:
            self.plan(start, end)
        else:
            self._window = None

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
        if self._names[0] != self._compiled.count:
            self._names = self._compiled.count, instruction_names(self._compiled.text())
        newest = device_time(*traced_ops(profile, module_name(self._compiled.text()), steps), self._names[1])
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
        self._trace.close()
