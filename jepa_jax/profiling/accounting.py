"""Divides the wall time of an epoch so that every second is counted once.

Host and device work at the same time, so a host section only costs time while the device is idle. A second in which the
device computes a training step belongs to the step, whatever the host does meanwhile; every other second belongs to the
host section of that moment. A data wait of 41 % thus means that the epoch would take 59 % of its time without it.

When the device is busy is measured by a thread that waits for each step (`DeviceClock`), so that the loop never has to.
Where steps are short, only some of them are watched in this way; in the others each host section is charged with the
same share of its time as in those (`Ledger`).
"""

import collections
import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax

from jepa_jax.profiling.sections import COUNTS_FOR, EpochSection, Phase, Section, Segment, Timeline

Interval = tuple[float, float]
Name = TypeVar("Name", bound=str)


@dataclasses.dataclass(frozen=True)
class Spent:
    """Seconds of a stretch of time.

    Attributes:
      seconds: all of it.
      device: while the device computed steps.
      exposed: by host section, while the device was idle.
      host: by host section, whether or not the device was idle.
    """

    seconds: float = 0.0
    device: float = 0.0
    exposed: Mapping[Section, float] = dataclasses.field(default_factory=dict)
    host: Mapping[Section, float] = dataclasses.field(default_factory=dict)

    def __add__(self, other: "Spent") -> "Spent":
        device = self.device + other.device
        return Spent(
            self.seconds + other.seconds, device, _sum(self.exposed, other.exposed), _sum(self.host, other.host)
        )


def _sum(a: Mapping[Section, float], b: Mapping[Section, float]) -> dict[Section, float]:
    return {section: a.get(section, 0.0) + b.get(section, 0.0) for section in {**a, **b}}


class DeviceClock:
    """Intervals in which dispatched steps were computed; a device computes steps one after the other."""

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        *,
        wait: Callable[[Any], Any] = lambda result: result.block_until_ready(),  # of an array, so without a tree
        inline: Callable[[Any], bool] | None = None,
    ):
        """`inline`: whether a call has computed its result; by default on CPUs, where it is ready then."""
        on_cpu = jax.default_backend() == "cpu"
        self._clock, self._wait = clock, wait
        self._inline = inline or (lambda result: on_cpu and result.is_ready())
        self._queue: queue.SimpleQueue = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._running: collections.deque[float] = collections.deque()  # when the steps not yet done were dispatched
        self._free_since = 0.0  # the device was done with everything before
        self._busy: list[Interval] = []
        self._thread = threading.Thread(target=self._run, name="device-clock", daemon=True)
        self._thread.start()

    def dispatched(self, began: float, result: Any) -> None:
        """Reports a step; its call began at `began` and has just returned `result`."""
        # CPUs compute small programs inside the call; other devices begin when the call returns.
        # This runs in every step, with cold caches: no lock, since appending to a deque needs none.
        self._running.append(began if self._inline(result) else self._clock())
        self._queue.put(result)

    def take(self, until: float) -> list[Interval]:
        """Returns the busy intervals since the last call up to `until`; a step that is still running is cut in two."""
        with self._lock:
            known = list(self._busy)
            if self._running and max(self._running[0], self._free_since) < until:
                known.append((max(self._running[0], self._free_since), until))
                self._free_since = until
            self._busy = [(max(start, until), end) for start, end in known if end > until]
        return [(start, min(end, until)) for start, end in known if start < until]

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (result := self._queue.get()) is not None:
            try:
                self._wait(result)
            except Exception:  # the loop meets the same error when it reads the result, and says so
                pass
            done = self._clock()
            del result  # the queue must not keep an array alive until the next step
            with self._lock:
                start = max(self._running.popleft(), self._free_since)
                if done > start:
                    self._busy.append((start, done))
                self._free_since = max(done, self._free_since)


class Ledger:
    """Accounts for the time of a timeline; `busy_until(t)` returns the device's new busy intervals up to time t.

    Between `rest` and `watch` the device is not watched: a host section is then charged with the share of its time that
    it was charged with since the last `watch`.

    Attributes:
      total: everything accounted for so far.
    """

    def __init__(self, timeline: Timeline, busy_until: Callable[[float], Sequence[Interval]]):
        self._timeline, self._busy_until = timeline, busy_until
        self._seconds: Mapping[Section, float] = {}  # of the timeline at the last update
        self._watched = Spent()  # since the last `watch`
        self._since_cut = Spent()
        self.total = Spent()

    def watch(self) -> None:
        self.update()
        self._busy_until(self._timeline.clock())  # forgets what it did before
        self._watched, self._timeline.keep_segments = Spent(), True

    def rest(self) -> None:
        self.update()
        self._timeline.keep_segments = False

    def update(self) -> Spent:
        """Returns the time spent until now; forgets the segments that it has accounted for."""
        segments, seconds = self._timeline.take_segments()
        if self._timeline.keep_segments:
            new = account(segments, self._busy_until(segments[-1][2])) if segments else Spent()
            self._watched += new
        else:
            new = self._estimate({name: max(0.0, at - self._seconds.get(name, 0.0)) for name, at in seconds.items()})
        self._seconds = seconds
        self._since_cut += new
        self.total += new
        return self.total

    def cut(self) -> Spent:
        """Returns the time spent since the last call."""
        self.update()
        spent, self._since_cut = self._since_cut, Spent()
        return spent

    def _estimate(self, host: Mapping[Section, float]) -> Spent:
        """Divides the time of host sections in which the device was not watched."""
        exposed = {}
        for name, seconds in host.items():
            watched = self._watched.host.get(name, 0.0)  # 0: something between steps, while the device is idle
            exposed[name] = seconds * (self._watched.exposed[name] / watched if watched > 0 else 1.0)
        total = sum(host.values())
        return Spent(total, total - sum(exposed.values()), exposed, host)


def account(segments: Sequence[Segment], busy: Sequence[Interval]) -> Spent:
    """Splits consecutive host segments by the sorted, disjoint intervals in which the device was busy."""
    exposed: dict[Section, float] = {}
    host: dict[Section, float] = {}
    total = device = 0.0
    first = 0
    for section, start, end in segments:
        length = end - start
        while first < len(busy) and busy[first][1] <= start:
            first += 1
        hidden, at = 0.0, first
        while at < len(busy) and busy[at][0] < end:
            hidden += min(end, busy[at][1]) - max(start, busy[at][0])
            at += 1
        total += length
        device += hidden
        host[section] = host.get(section, 0.0) + length
        exposed[section] = exposed.get(section, 0.0) + length - hidden
    return Spent(total, device, exposed, host)


def breakdown(spent: Spent, shares: Mapping[Phase, float] | None, transfer_share: float) -> dict[EpochSection, float]:
    """Returns the seconds of each epoch section, which add up to `spent.seconds`.

    Args:
      spent: the time to divide.
      shares: parts of the device's time by phase, adding up to 1; None without a trace: all of it is then OTHER.
      transfer_share: part of the wait for data in which the loader copied to the device, 0 to 1.
    """
    seconds = dict.fromkeys(EpochSection, 0.0)
    for phase, share in ({Phase.OTHER: 1.0} if shares is None else shares).items():
        seconds[COUNTS_FOR.get(phase, EpochSection.OTHER)] += spent.device * share
    for section, value in spent.exposed.items():
        seconds[COUNTS_FOR.get(section, EpochSection.OTHER)] += value
    seconds[EpochSection.DATA_TRANSFER] = seconds[EpochSection.DATA_WAIT] * transfer_share
    seconds[EpochSection.DATA_WAIT] -= seconds[EpochSection.DATA_TRANSFER]
    return seconds


def percentages(seconds: Mapping[Name, float]) -> dict[Name, float]:
    """Returns each part of a breakdown in percent; 0 if the whole is 0."""
    total = sum(seconds.values())
    return {name: 100 * value / total if total > 0 else 0.0 for name, value in seconds.items()}
