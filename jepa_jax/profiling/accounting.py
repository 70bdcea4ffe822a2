"""Where the wall time of an epoch goes, every second counted once.

Host and device work at the same time, so a host section costs something only while the device has nothing to do. A
second in which the device computes a training step is the step's, whatever the host does meanwhile; every other second
belongs to the host section of that moment. A data wait of 41 % then means: without it the epoch takes 59 % of its time.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from jepa_jax.profiling.timers import Segment, Timeline

Interval = tuple[float, float]

# The sections of an epoch, in the words of the metrics; they add up to the whole.
SECTIONS = (
    "forward_pass", "backward_pass", "augment", "optimizer_step", "ema_update", "data_wait", "data_transfer",
    "validation_epoch", "visualization_generation", "checkpoint", "compile", "other",
)  # fmt: skip
# Phase of the device timeline -> section.
PHASES = {
    "forward": "forward_pass",
    "backward": "backward_pass",
    "augment": "augment",
    "optimizer": "optimizer_step",
    "ema": "ema_update",
    "other": "other",
}
# Section of the host timeline -> section; what is not named here is `other`.
HOST = {
    "data_wait": "data_wait",
    "validation": "validation_epoch",
    "visualization": "visualization_generation",
    "checkpoint": "checkpoint",
    "compile": "compile",
}
# Parts of `other` that can be named.
OVERHEADS = ("dispatch", "device_wait", "logging", "profiler", "other")


@dataclasses.dataclass(frozen=True)
class Spent:
    """Seconds of a stretch of time: `device` computing steps and, while it was not, `exposed` by host section.

    `host` holds the whole exclusive host sections, also what the device hid.
    """

    seconds: float = 0.0
    device: float = 0.0
    exposed: Mapping[str, float] = dataclasses.field(default_factory=dict)
    host: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def __add__(self, other: "Spent") -> "Spent":
        return Spent(
            self.seconds + other.seconds,
            self.device + other.device,
            add(self.exposed, other.exposed),
            add(self.host, other.host),
        )

    def __sub__(self, other: "Spent") -> "Spent":
        return self + Spent(-other.seconds, -other.device, _negative(other.exposed), _negative(other.host))


class Ledger:
    """Accounts for the time of a timeline as it goes by; `busy_until(t)` gives the device's new intervals up to t."""

    def __init__(self, timeline: Timeline, busy_until: Callable[[float], Sequence[Interval]]):
        self._timeline, self._busy_until = timeline, busy_until
        self.total = Spent()

    def update(self) -> Spent:
        """Everything up to now; also frees the segments that have been accounted for."""
        segments = self._timeline.take_segments()
        if segments:
            self.total += account(segments, self._busy_until(segments[-1][2]))
        return self.total


def _negative(seconds: Mapping[str, float]) -> dict[str, float]:
    return {name: -value for name, value in seconds.items()}


def add(a: Mapping[str, float], b: Mapping[str, float]) -> dict[str, float]:
    return {name: a.get(name, 0.0) + b.get(name, 0.0) for name in {**a, **b}}


def account(segments: Sequence[Segment], busy: Sequence[Interval]) -> Spent:
    """Splits consecutive host segments by sorted, disjoint intervals in which the device was computing."""
    exposed: dict[str, float] = {}
    host: dict[str, float] = {}
    total = device = 0.0
    first = 0
    for name, start, end in segments:
        length = end - start
        while first < len(busy) and busy[first][1] <= start:
            first += 1
        hidden, at = 0.0, first
        while at < len(busy) and busy[at][0] < end:
            hidden += min(end, busy[at][1]) - max(start, busy[at][0])
            at += 1
        total += length
        device += hidden
        host[name] = host.get(name, 0.0) + length
        exposed[name] = exposed.get(name, 0.0) + length - hidden
    return Spent(total, device, exposed, host)


def breakdown(spent: Spent, shares: Mapping[str, float] | None, transfer_share: float) -> dict[str, float]:
    """Seconds of each of SECTIONS, adding up to `spent.seconds`.

    Args:
      shares: of the device's time by phase, adding up to 1; None where no trace has been read: all of it is `other`.
      transfer_share: the part of the wait for data in which the loader was copying to the device, 0 to 1.
    """
    seconds = dict.fromkeys(SECTIONS, 0.0)
    for phase, share in ({"other": 1.0} if shares is None else shares).items():
        seconds[PHASES[phase]] += spent.device * share
    for name, value in spent.exposed.items():
        seconds[HOST.get(name, "other")] += value
    seconds["data_transfer"] = seconds["data_wait"] * transfer_share
    seconds["data_wait"] -= seconds["data_transfer"]
    return seconds


def percentages(seconds: Mapping[str, float]) -> dict[str, float]:
    """Of a breakdown; 0 of nothing."""
    total = sum(seconds.values())
    return {name: 100 * value / total if total > 0 else 0.0 for name, value in seconds.items()}
