"""Data that fail to come, for tests that start the command."""

import errno
import multiprocessing
import os
import signal
import threading
import time
from typing import Any

import numpy as np

from jepa_jax.data.readers.folder import FolderSource
from jepa_jax.data.reading import reading
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


class LostShapes(ShapesSource):
    """As if its files were on a server: while `fault` is set they are gone, or reading them hangs."""

    fault = ""

    def batch(self, indices: np.ndarray) -> dict[str, Any]:
        if LostShapes.fault == "gone":
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "/server/shapes")
        if LostShapes.fault == "hangs":
            with reading(lambda: "/server/shapes/0"):
                threading.Event().wait()
        return super().batch(indices)


class HangingPhotos(FolderSource):
    """Photographs on a server that does not answer while there is a file `hangs` in the folder of the set."""

    def content(self, index: int) -> bytes:
        while (self._root.parent / "hangs").exists():
            time.sleep(0.1)
        return super().content(index)
