"""Host time by section, exclusive: time inside a nested section counts there and nowhere else, so sections add up."""

import collections
import contextlib
import time
from collections.abc import Callable, Iterator

OTHER = "other"


class Timeline:
    """Splits the time since its start among named sections; what no section claims is `other`."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self._open = [OTHER]
        self._since = clock()
        self._seconds: dict[str, float] = collections.defaultdict(float)

    @contextlib.contextmanager
    def section(self, name: str) -> Iterator[None]:
        self._charge()
        self._open.append(name)
        try:
            yield
        finally:
            self._charge()
            self._open.pop()

    def seconds(self) -> dict[str, float]:
        """Seconds of each section up to now; their sum is the time since the start."""
        self._charge()
        return dict(self._seconds)

    def _charge(self) -> None:
        now = self._clock()
        self._seconds[self._open[-1]] += now - self._since
        self._since = now
