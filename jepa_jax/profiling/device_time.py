"""Reads the device time of one compiled step by phase and named scope from a trace.

Events of a trace name instructions of the compiled program, and the program's text names the scope that each
instruction came from: `jit(train_step)/jvp(encoder)/dot` is the encoder's forward pass, `transpose(jvp(encoder))` its
backward pass. An instruction that contains others (a loop, a branch, a call) is charged with its own time only, and
instructions that run at the same time share that time equally, so the parts add up to the device's busy time. A fusion
counts for the scope of its result.

On a GPU copies run beside kernels. Those between host and device that no instruction asked for move the next batch and
the last metrics: they are no work of the step and are counted apart. Those of the step count while no kernel runs.
"""

import collections
import dataclasses
import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jepa_jax.compiled.hlo import parse_hlo
from jepa_jax.compiled.kernels import Kernel, kernels_by_name
from jepa_jax.profiling.sections import Phase

# Scopes that are a phase of their own, in both directions.
OWN_PHASE = {"augment": Phase.AUGMENT, "optimizer": Phase.OPTIMIZER, "ema": Phase.EMA}
TOP_OPS = 30

Piece = tuple[str, float, float]  # operation, start, end
Means = dict[str, float]  # by operation

_WRAPPED = re.compile(r"(?!p?jit\()\w+\((.*)\)")  # jit(f) names a function, not a scope
# Parts of an op_name that JAX gives: control flow, calls, and the subscripts of einsum.
_OF_JAX = re.compile(
    r"|p?jit\(.*\)|while|body|cond|scan|branch_\d+_fun|closed_call|core_call|checkpoint|remat2?"
    r"|rematted_computation|custom_(jvp|vjp)_call\w*|shard_map|pallas_call|.*->.*"
)


@dataclasses.dataclass(frozen=True)
class DeviceTime:
    """What the device did in one step: the mean over the devices and steps of a trace."""

    busy_seconds: float
    phases: dict[Phase, float]  # shares of the busy time, adding up to 1
    scopes: list[dict[str, Any]]  # scope, phase, share; largest first
    ops: list[dict[str, Any]]  # the longest: op, scope, phase, share, calls, op_name, gflop_per_second, gb_per_second
    attributed: float  # share of the busy time of instructions with a name
    copy_seconds: float = 0.0  # of copies that are no work of the step


def classify(op_name: str) -> tuple[Phase, str]:
    """Returns phase and outermost `jax.named_scope` of an op_name; (Phase.OTHER, "") if it has none."""
    op_name = op_name.split(";")[0]  # merged instructions list several; the first is the one that stayed
    backward = differentiated = False
    for part in _components(op_name)[:-1]:  # the last one is the operation
        backward |= part.startswith("transpose(")
        differentiated |= part.startswith(("jvp(", "transpose("))
        while match := _WRAPPED.fullmatch(part):
            part = match[1]
        if not _OF_JAX.fullmatch(part):
            return OWN_PHASE.get(part, Phase.BACKWARD if backward else Phase.FORWARD), part
    if differentiated:
        return Phase.BACKWARD if backward else Phase.FORWARD, ""
    return Phase.OTHER, ""


def _components(op_name: str) -> list[str]:
    """Splits at the slashes outside parentheses."""
    parts, depth, start = [], 0, 0
    for at, letter in enumerate(op_name):
        depth += (letter == "(") - (letter == ")")
        if letter == "/" and depth == 0:
            parts.append(op_name[start:at])
            start = at + 1
    return [*parts, op_name[start:]]


class NoDevicePlanes(Exception):
    """A recording of an accelerator holds nothing of it; the host's threads say nothing about its time."""


@functools.lru_cache(maxsize=1)
def read_program(hlo_text: str, platform: str) -> tuple[str, Mapping[str, str], Mapping[str, Kernel]]:
    """Returns module, op_names and, except on CPUs, kernels by instruction of what `compiled.as_text()` returns."""
    program = parse_hlo(hlo_text)
    names = program.op_names(lambda op_name: classify(op_name)[0] != Phase.OTHER)
    return program.name, names, kernels_by_name(program) if platform != "cpu" else {}


def read_device_time(profile: Any, hlo_text: str, *, steps: int, platform: str = "cpu") -> DeviceTime | None:
    """Reads a `jax.profiler.ProfileData` of `steps` steps; None if it contains nothing of the program."""
    module, names, kernels = read_program(hlo_text, platform)
    seconds, calls, copied = traced_ops(profile, module, steps, platform)
    busy = sum(seconds.values())
    if busy <= 0:
        return None
    # Kernels inside a command buffer have no instruction, but are named after one, with other punctuation.
    unknown = any(op not in names for op in seconds)
    by_kernel = {_kernel_name(name): name for name in names} if unknown else {}
    phases = dict.fromkeys(Phase, 0.0)
    scopes: dict[tuple[str, Phase], float] = collections.defaultdict(float)
    rows: list[dict[str, Any]] = []
    attributed = 0.0
    for op, value in seconds.items():
        if value <= 0:
            continue
        name = op if op in names else by_kernel.get(_kernel_name(op))
        op_name = names.get(name, "") if name else ""
        phase, scope = classify(op_name)
        share = value / busy
        attributed += share if op_name else 0.0
        phases[phase] += share
        scopes[scope, phase] += share
        row = {"op": op, "scope": scope, "phase": phase, "share": share, "calls": calls.get(op, 0), "op_name": op_name}
        kernel, rate = kernels.get(name or ""), calls.get(op, 0.0) / value / 1e9
        row["gflop_per_second"] = kernel.flops * rate if kernel and kernel.flops else None
        row["gb_per_second"] = kernel.bytes * rate if kernel and kernel.bytes else None
        rows.append(row)
    rows.sort(key=lambda row: -row["share"])
    largest = sorted(scopes.items(), key=lambda item: -item[1])
    table = [{"scope": scope, "phase": phase, "share": share} for (scope, phase), share in largest]
    return DeviceTime(busy, phases, table, rows[:TOP_OPS], attributed, copied)


def _kernel_name(name: str) -> str:
    return re.sub(r"[^0-9A-Za-z]", "_", name)


@dataclasses.dataclass(frozen=True)
class Event:
    """An event of a trace; times in ns.

    Attributes:
      op: the instruction, or the kernel's name if it has none.
      module: of the instruction; empty if the event names none.
      is_copy: whether it is a copy of memory.
    """

    op: str
    start: float
    end: float
    module: str
    is_copy: bool

    @property
    def is_foreign_copy(self) -> bool:
        """Whether it copies between host and device, or devices, and no instruction asked for it."""
        return self.is_copy and not self.module and "d2d" not in self.op.lower()


def traced_ops(profile: Any, module: str, steps: int, platform: str) -> tuple[Means, Means, float]:
    """Returns seconds and calls per step of each instruction of `module`, and seconds of copies that are not its work.

    All are means over devices; the seconds of an instruction are those of `exclusive_time`.
    """
    on_host = platform == "cpu"
    planes = [plane for plane in profile.planes if plane.name.startswith("/host:" if on_host else "/device:")]
    if not on_host and not any(list(plane.lines) for plane in planes):
        raise NoDevicePlanes(platform)
    seconds: dict[str, float] = collections.defaultdict(float)
    calls: collections.Counter = collections.Counter()
    devices, copied = 0, 0.0
    for plane in planes:
        kernels: list[list[Piece]] = []
        copies: list[Piece] = []
        for line in _compute_lines(list(plane.lines)):
            events = [event for event in map(_read_event, line.events) if event]
            copied += sum(event.end - event.start for event in events if event.is_foreign_copy)
            # Events without an instruction are bookkeeping on a host, and on an accelerator command buffers and
            # kernels of libraries; copies without one are the loader's and the reader's of metrics.
            others = [] if on_host else [event for event in events if not event.module and not event.is_foreign_copy]
            work = [event for event in events if event.module == module] + others
            calls.update(event.op for event in work)
            kernels.append([(event.op, event.start, event.end) for event in work if not event.is_copy])
            copies += [(event.op, event.start, event.end) for event in work if event.is_copy]
        devices += any(kernels)
        for op, value in exclusive_time(kernels, copies).items():
            seconds[op] += value
    scale = max(devices, 1) * steps
    per_step = {op: value * 1e-9 / scale for op, value in seconds.items()}
    return per_step, {op: number / scale for op, number in calls.items()}, copied * 1e-9 / scale


def _compute_lines(lines: list[Any]) -> list[Any]:
    """Returns the lines of a plane that hold operations; others repeat them by step, module or scope."""
    for prefix in ("Stream", "XLA Ops"):
        chosen = [line for line in lines if line.name.startswith(prefix)]
        if chosen:
            return chosen
    return lines


def _read_event(event: Any) -> Event | None:
    """Returns an event; None for marks without a length."""
    length = event.duration_ns
    if length <= 0 or event.name.startswith("end: "):
        return None
    stats = dict(event.stats)
    op, module = stats.get("hlo_op") or event.name, stats.get("hlo_module") or ""
    is_copy = event.name.lower().startswith("memcpy")
    return Event(str(op), event.start_ns, event.start_ns + length, module, is_copy)


def exclusive_time(lines: Sequence[Iterable[Piece]], copies: Sequence[Piece] = ()) -> dict[str, float]:
    """Returns the time of each operation on one device.

    Args:
      lines: operations by line. Of nested ones the innermost counts; lines that run at the same time share it equally.
      copies: count while no line runs.
    """
    rows = [*lines, *([copy] for copy in copies)]
    changes = []
    for row, events in enumerate(rows):
        for op, start, end in events:
            # At one moment operations end before others start, and outer ones start before inner ones.
            changes += [(start, 1, start - end, row, op), (end, 0, 0.0, row, op)]
    time: dict[str, float] = collections.defaultdict(float)
    running: dict[int, list[str]] = collections.defaultdict(list)  # by row, the innermost last
    since = 0.0
    for at, starts, _, row, op in sorted(changes):
        innermost = [ops[-1] for line, ops in running.items() if line < len(lines)]
        innermost = innermost or [ops[-1] for ops in running.values()]
        for name in innermost:
            time[name] += (at - since) / len(innermost)
        since = at
        if starts:
            running[row].append(op)
        else:
            running[row].remove(op)
            if not running[row]:
                del running[row]
    return dict(time)
