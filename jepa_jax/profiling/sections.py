"""What a run spends its time on: names of the sections, and the timeline that measures those of the host."""

import collections
import contextlib
import enum
import time
from collections.abc import Callable


class EpochSection(enum.StrEnum):
    """Parts of an epoch's wall time, as the metrics name them; together they are the whole epoch."""

    FORWARD_PASS = "forward_pass"
    BACKWARD_PASS = "backward_pass"
    AUGMENT = "augment"
    OPTIMIZER_STEP = "optimizer_step"
    EMA_UPDATE = "ema_update"
    DATA_WAIT = "data_wait"
    DATA_TRANSFER = "data_transfer"
    VALIDATION_EPOCH = "validation_epoch"
    VISUALIZATION_GENERATION = "visualization_generation"
    CHECKPOINT = "checkpoint"
    COMPILE = "compile"
    OTHER = "other"


class Section(enum.StrEnum):
    """What the host does; exactly one at any time."""

    DATA_WAIT = "data_wait"
    DISPATCH = "dispatch"
    DEVICE_WAIT = "device_wait"
    LOGGING = "logging"
    VALIDATION = "validation"
    VISUALIZATION = "visualization"
    CHECKPOINT = "checkpoint"
    COMPILE = "compile"
    PROFILER = "profiler"
    OTHER = "other"

    __hash__ = str.__hash__  # that of enums is a Python function, which every dict of the timeline would call


class Phase(enum.StrEnum):
    """What the device does in a training step."""

    FORWARD = "forward"
    BACKWARD = "backward"
    AUGMENT = "augment"
    OPTIMIZER = "optimizer"
    EMA = "ema"
    OTHER = "other"


# Time that belongs to steps: not compilations, evaluations, pictures, checkpoints or the profiler's own work.
STEP_SECTIONS = (Section.DATA_WAIT, Section.DISPATCH, Section.DEVICE_WAIT, Section.LOGGING, Section.OTHER)
# Named parts of EpochSection.OTHER.
OVERHEADS = (Section.DISPATCH, Section.DEVICE_WAIT, Section.LOGGING, Section.PROFILER, Section.OTHER)
# What happens between steps.
BETWEEN_STEPS = (
    EpochSection.VALIDATION_EPOCH,
    EpochSection.VISUALIZATION_GENERATION,
    EpochSection.CHECKPOINT,
    EpochSection.COMPILE,
)
# What sections, while the device is idle, and phases count for; those that are missing count for EpochSection.OTHER.
COUNTS_FOR: dict[Section | Phase, EpochSection] = {
    Section.DATA_WAIT: EpochSection.DATA_WAIT,
    Section.VALIDATION: EpochSection.VALIDATION_EPOCH,
    Section.VISUALIZATION: EpochSection.VISUALIZATION_GENERATION,
    Section.CHECKPOINT: EpochSection.CHECKPOINT,
    Section.COMPILE: EpochSection.COMPILE,
    Phase.FORWARD: EpochSection.FORWARD_PASS,
    Phase.BACKWARD: EpochSection.BACKWARD_PASS,
    Phase.AUGMENT: EpochSection.AUGMENT,
    Phase.OPTIMIZER: EpochSection.OPTIMIZER_STEP,
    Phase.EMA: EpochSection.EMA_UPDATE,
}

TRACE_NAMES = {Section.DATA_WAIT: "IteratorGetNext: data_wait"}  # the beginning by which xprof knows the wait for input

Segment = tuple[Section, float, float]  # section, start, end on the timeline's clock


class _Inside(contextlib.AbstractContextManager[None]):
    """A `with` block of a section; several of them are entered per step, at a third of a generator's cost."""

    __slots__ = ("_section", "_timeline")

    def __init__(self, timeline: "Timeline", section: Section):
        self._timeline, self._section = timeline, section

    def __enter__(self) -> None:
        self._timeline.enter(self._section)

    def __exit__(self, *exc: object) -> None:
        self._timeline.leave()


class Timeline:
    """Divides the time since its creation among sections; time outside all sections is `Section.OTHER`.

    Time inside a nested section counts for that section only, so the sections add up.

    Attributes:
      keep_segments: whether to remember when each section ran, until `take_segments` is called.
      annotate: while a trace is recorded, makes the `with` block by which a section is seen in it.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter, *, keep_segments: bool = False):
        self.clock, self.keep_segments = clock, keep_segments
        self.annotate: Callable[[str], contextlib.AbstractContextManager] | None = None
        self._annotations: list[contextlib.AbstractContextManager] = []  # of the innermost sections
        self._open = [Section.OTHER]
        self._since = clock()
        self._seconds: dict[Section, float] = collections.defaultdict(float)
        self._segments: list[Segment] = []

    def section(self, section: Section) -> contextlib.AbstractContextManager[None]:
        """Charges the time inside the `with` block to a section."""
        return _Inside(self, section)

    def enter(self, section: Section) -> None:
        """Charges the time from now on to a section, until `leave`."""
        self._charge()
        self._open.append(section)
        if self.annotate:
            annotation = self.annotate(TRACE_NAMES.get(section, section.value))
            annotation.__enter__()
            self._annotations.append(annotation)

    def leave(self) -> None:
        """Charges the time from now on to what was open before the last `enter`."""
        self._charge()
        self._open.pop()
        if self._annotations:
            self._annotations.pop().__exit__(None, None, None)

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
        return sum(map(self._seconds.__getitem__, STEP_SECTIONS))  # per step: without a generator

    def take_segments(self) -> tuple[list[Segment], dict[Section, float]]:
        """Returns the segments that were kept since the last call, in order, and the seconds of each section."""
        seconds = self.seconds()
        taken, self._segments = self._segments, []
        return taken, seconds

    def _charge(self) -> None:
        now = self.clock()
        self._seconds[self._open[-1]] += now - self._since
        if self.keep_segments and now > self._since:
            self._segments.append((self._open[-1], self._since, now))
        self._since = now
