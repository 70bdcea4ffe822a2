"""Ctrl-C and SIGTERM as a flag that the loop looks at between steps, so that a run ends with a checkpoint."""

import signal
import threading
from types import FrameType, TracebackType

from jepa_jax.base.errors import EXIT_INTERRUPTED, EXIT_TERMINATED

EXIT_CODES = {signal.SIGINT: EXIT_INTERRUPTED, signal.SIGTERM: EXIT_TERMINATED}


class Interrupted(Exception):
    """The run was asked to stop and has stopped at the end of a step."""

    def __init__(self, signum: signal.Signals):
        super().__init__(signum.name)
        self.exit_code = EXIT_CODES[signum]


class InterruptFlag:
    """Catches SIGINT and SIGTERM while it is open; a second signal acts at once."""

    def __init__(self) -> None:
        self.raised: signal.Signals | None = None
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> "InterruptFlag":
        if threading.current_thread() is threading.main_thread():  # elsewhere Python allows no handlers
            self._previous = {signum: signal.signal(signum, self._catch) for signum in EXIT_CODES}
        return self

    def _catch(self, signum: int, frame: FrameType | None) -> None:
        del frame
        self.raised = signal.Signals(signum)
        self._restore()

    def _restore(self) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)  # type: ignore[arg-type]
        self._previous = {}

    def __exit__(self, kind: type | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self._restore()

    def check(self) -> None:
        """Raises Interrupted if a signal came."""
        if self.raised is not None:
            raise Interrupted(self.raised)
