"""A recording of a few steps for TensorBoard's profile plugin and Perfetto."""

import pathlib

import jax


class TraceWindow:
    """Records steps A to B of "A:B" (the first step is 0) into `directory`; an empty string records nothing."""

    def __init__(self, steps: str, directory: pathlib.Path):
        first, last = (int(part) for part in steps.split(":")) if steps else (-1, -1)
        self._first, self._last = first, max(first, last)
        self._directory = directory
        self._recording = False

    def before(self, step: int) -> None:
        """Step number `step` is about to be dispatched."""
        if step == self._first:
            jax.profiler.start_trace(str(self._directory), create_perfetto_trace=True)
            self._recording = True

    def ends_at(self, done: int) -> bool:
        return self._recording and done == self._last + 1

    def after(self, done: int) -> None:
        """So many steps have been dispatched; those of the window have been computed."""
        if self.ends_at(done):
            self.close()

    def close(self) -> None:
        if self._recording:
            self._recording = False
            jax.profiler.stop_trace()
