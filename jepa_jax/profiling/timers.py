"""Host time by section. Time inside a nested section counts for that section only, so the sections add up."""

import collections
import contextlib
import time
from collections.abc import Callable, Iterator

from jepa_jax.profiling.sections import STEP_SECTIONS, Section

Segment = tuple[Section, float, float]  # section, start, end on the timeline's clock


class Timeline:
    """Divides the time since its creation among sections; time outside all sections is `Section.OTHER`.

    With `keep_segments` it also remembers when each section ran, until `take_segments` is called.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter, *, keep_segments: bool = False):
        self.clock = clock
        self._open = [Section.OTHER]
        self._since = clock()
        self._seconds: dict[Section, float] = collections.defaultdict(float)
        self._segments: list[Segment] = []
        self._keep = keep_segments

    @contextlib.contextmanager
    def section(self, section: Section) -> Iterator[None]:
        """Charges the time inside the `with` block to a section."""
        self._charge()
        self._open.append(section)
        try:
            yield
        finally:
            self._charge()
            self._open.pop()

    def move(self, section: Section, seconds: float) -> None:
        """Moves the last `seconds` from the open section to another one, for work that is only known afterwards."""
        self._charge()
        seconds = min(seconds, self._seconds[self._open[-1]])
        self._seconds[self._open[-1]] -= seconds
        self._seconds[section] += seconds
        start, moved = self._since - seconds, []
        while self._segments and self._segments[-1][2] > start:
            previous, begin, end = self._segments.pop()
            if begin < start:
                self._segments.append((previous, begin, start))
            moved.append((section, max(begin, start), end))
        self._segments.extend(reversed(moved))

    def seconds(self) -> dict[Section, float]:
        """Returns the seconds of each section until now; their sum is the time since the timeline was created."""
        self._charge()
        return dict(self._seconds)

    def step_seconds(self) -> float:
        """Returns the seconds until now that belong to training steps."""
        self._charge()
        return sum(self._seconds[section] for section in STEP_SECTIONS)

    def take_segments(self) -> list[Segment]:
        """Returns the sections since the last call, in order and without gaps."""
        self._charge()
        taken, self._segments = self._segments, []
        return taken

    def _charge(self) -> None:
        now = self.clock()
        self._seconds[self._open[-1]] += now - self._since
        if self._keep and now > self._since:
            self._segments.append((self._open[-1], self._since, now))
        self._since = now
