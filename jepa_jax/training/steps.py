"""Takes training steps, for runs and for the measurement of trials."""

import collections
from collections.abc import Callable

import jax

from jepa_jax.data.pipeline import BatchInfo, Delivery, TrainBatches
from jepa_jax.profiling.compilations import CompiledStep
from jepa_jax.profiling.sections import Section, Timeline
from jepa_jax.program.step_metrics import StepMetrics
from jepa_jax.training.progress import Loop

OnDispatch = Callable[[float, jax.Array, BatchInfo], object]  # time of the call, a result of the step, its batch's info


class Steps:
    """Dispatches steps and reads their metrics later, so that the device has the next step while the host reads.

    Attributes:
      timeline: charged for waiting, dispatching and reading.
    """

    def __init__(self, train_step: CompiledStep, timeline: Timeline, on_dispatch: OnDispatch):
        self.timeline = timeline
        self._train_step, self._on_dispatch = train_step, on_dispatch
        self._pending: collections.deque[tuple[int, StepMetrics]] = collections.deque()

    def wait_for(self, batches: TrainBatches, check: Callable[[], object] = lambda: None) -> Delivery:
        """Returns the next batch and how it was supplied; calls `check`, which may raise, while there is none."""
        with self.timeline.section(Section.DATA_WAIT):
            return batches.wait(check)

    def dispatch(self, loop: Loop, delivery: Delivery) -> StepMetrics:
        """Hands the next step to the device and advances the loop; returns its metrics, which stay on the device."""
        batch, info = delivery
        began = self.timeline.clock()
        with self.timeline.section(Section.DISPATCH):
            loop.state, metrics = self._train_step(loop.state, batch)
        loop.step += 1
        loop.progress.data_state = info.get("state")
        self._on_dispatch(began, metrics.packed, info)
        self._pending.append((loop.step, metrics))
        return metrics

    def read(self, *, lag: int) -> list[tuple[int, dict[str, float]]]:
        """Waits for all but the newest `lag` steps; returns the number and the metrics of those not read yet."""
        complete = [self._pending.popleft() for _ in range(len(self._pending) - lag)]
        with self.timeline.section(Section.DEVICE_WAIT):
            return [(step, metrics.floats()) for step, metrics in complete]
