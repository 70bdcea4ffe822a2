"""Divides the wall time of an epoch so that every second is counted once.

Host and device work at the same time, so a host section only costs time while the device is idle. A second in which the
device computes a training step belongs to the step, whatever the host does meanwhile; every other second belongs to the
host section of that moment. A data wait of 41 % thus means that the epoch would take 59 % of its time without it.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from jepa_jax.profiling.sections import EpochSection, Phase, Section, Segment, Timeline

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
        return self._plus(other, 1.0)

    def __sub__(self, other: "Spent") -> "Spent":
        return self._plus(other, -1.0)

    def _plus(self, other: "Spent", sign: float) -> "Spent":
        return Spent(
            self.seconds + sign * other.seconds,
            self.device + sign * other.device,
            _add(self.exposed, other.exposed, sign),
            _add(self.host, other.host, sign),
        )


def _add(a: Mapping[Section, float], b: Mapping[Section, float], sign: float) -> dict[Section, float]:
    return {section: a.get(section, 0.0) + sign * b.get(section, 0.0) for section in {**a, **b}}


class Ledger:
    """Accounts for the time of a timeline; `busy_until(t)` returns the device's new busy intervals up to time t."""

    def __init__(self, timeline: Timeline, busy_until: Callable[[float], Sequence[Interval]]):
        self._timeline, self._busy_until = timeline, busy_until
        self.total = Spent()

    def update(self) -> Spent:
        """Returns the time spent until now; forgets the segments that it has accounted for."""
        segments = self._timeline.take_segments()
        if segments:
            self.total += account(segments, self._busy_until(segments[-1][2]))
        return self.total


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
        seconds[Phase(phase).epoch_section] += spent.device * share
    for section, value in spent.exposed.items():
        seconds[Section(section).epoch_section] += value
    seconds[EpochSection.DATA_TRANSFER] = seconds[EpochSection.DATA_WAIT] * transfer_share
    seconds[EpochSection.DATA_WAIT] -= seconds[EpochSection.DATA_TRANSFER]
    return seconds


def percentages(seconds: Mapping[Name, float]) -> dict[Name, float]:
    """Returns each part of a breakdown in percent; 0 if the whole is 0."""
    total = sum(seconds.values())
    return {name: 100 * value / total if total > 0 else 0.0 for name, value in seconds.items()}
