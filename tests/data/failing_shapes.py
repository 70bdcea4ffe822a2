"""Shapes that workers fail to deliver, for tests that start the command."""

import multiprocessing
import os
import signal
from typing import Any

import numpy as np

from jepa_jax.data.synthetic import ShapesSource

GOOD_BATCHES = 2  # that each worker makes before it fails


class FailingShapes(ShapesSource):
    """Sends a signal to each worker process when it is to make its third batch."""

    signum: signal.Signals

    def batch(self, indices: np.ndarray) -> dict[str, Any]:
        if multiprocessing.parent_process() is not None:
            self.calls = getattr(self, "calls", 0) + 1
            if self.calls > GOOD_BATCHES:
                os.kill(os.getpid(), self.signum)
        return super().batch(indices)


class KilledShapes(FailingShapes):
    """Its workers die again and again."""

    signum = signal.SIGKILL


class StoppedShapes(FailingShapes):
    """Its workers stop and never go on."""

    signum = signal.SIGSTOP
