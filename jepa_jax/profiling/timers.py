"""Host time by section, exclusive: time inside a nested section counts there and nowhere else, so sections add up."""

import collections
import contextlib
import time
from collections.abc import Callable, Iterator

OTHER = "other"
# What a step is charged with: not compilations, evaluations, pictures, checkpoints or the profiler's own work.
STEP_SECTIONS = ("data_wait", "dispatch", "device_wait", "logging", "other")

Segment = tuple[str, float, float]  # section, start, end on the timeline's clock


class Timeline:
    """Splits the time since its start among named sections; what no section claims is `other`.

    With `keep_segments` it also remembers when each section ran, until `take_segments` asks for it.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter, *, keep_segments: bool = False):
        self.clock = clock
        self._open = [OTHER]
        self._since = clock()
        self._seconds: dict[str, float] = collections.defaultdict(float)
        self._segments: list[Segment] = []
        self._keep = keep_segments

    @contextlib.contextmanager
    def section(self, name: str) -> Iterator[None]:
        self._charge()
        self._open.append(name)
        try:
            yield
        finally:
            self._charge()
            self._open.pop()

    def move(self, name: str, seconds: float) -> None:
        """The last `seconds` belong to section `name`, whatever was open: for what is known only when it is over."""
        self._charge()
        seconds = min(seconds, self._seconds[self._open[-1]])
        self._seconds[self._open[-1]] -= seconds
        self._seconds[name] += seconds
        start, moved = self._since - seconds, []
        while self._segments and self._segments[-1][2] > start:
            section, begin, end = self._segments.pop()
            if begin < start:
                self._segments.append((section, begin, start))
            moved.append((name, max(begin, start), end))
        self._segments.extend(reversed(moved))

    def seconds(self) -> dict[str, float]:
        """Seconds of each section up to now; their sum is the time since the start."""
        self._charge()
        return dict(self._seconds)

    def step_seconds(self) -> float:
        """Seconds up to now that steps are charged with."""
        self._charge()
        return sum(self._seconds[name] for name in STEP_SECTIONS)

    def take_segments(self) -> list[Segment]:
        """The sections since the last call, in order and without gaps."""
        self._charge()
        taken, self._segments = self._segments, []
        return taken

    def _charge(self) -> None:
        now = self.clock()
        self._seconds[self._open[-1]] += now - self._since
        if self._keep and now > self._since:
            self._segments.append((self._open[-1], self._since, now))
        self._since = now
