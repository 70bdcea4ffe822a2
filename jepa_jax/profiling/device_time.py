"""Reads the device time of one compiled step by phase and named scope from a trace.

Events of a trace name instructions of the compiled program, and the program's text names the scope that each
instruction came from: `jit(train_step)/jvp(encoder)/dot` is the encoder's forward pass, `transpose(jvp(encoder))` its
backward pass. An instruction that contains others (a loop, a branch, a call) is charged with its own time only, and
instructions that run at the same time share that time equally, so the parts add up to the device's busy time. A fusion
counts for the scope of its result.
"""

import collections
import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any

from jepa_jax.profiling.sections import Phase

# Scopes that are a phase of their own, in both directions.
OWN_PHASE = {"augment": Phase.AUGMENT, "optimizer": Phase.OPTIMIZER, "ema": Phase.EMA}
# Names that methods and the step give to `jax.named_scope`.
SCOPES = ("augment", "optimizer", "ema", "target", "encoder", "predictor", "projector", "loss", "probe")
TOP_OPS = 30

_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = ")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$")
_OP_NAME = re.compile(r'metadata=\{[^}]*?op_name="([^"]*)"')
_CALLS = re.compile(r"(?:calls|to_apply)=%?([\w.\-]+)")
_MODULE = re.compile(r"^HloModule ([\w.\-]+)")
_WRAPPED = re.compile(r"^\w+\((.*)\)$")


@dataclasses.dataclass(frozen=True)
class DeviceTime:
    """What the device did in one step: the mean over the devices and steps of a trace."""

    busy_seconds: float
    phases: dict[Phase, float]  # shares of the busy time, adding up to 1
    scopes: list[dict[str, Any]]  # scope, phase, share; largest first
    ops: list[dict[str, Any]]  # the longest instructions: op, scope, phase, share, calls, op_name
    attributed: float  # share of the busy time of instructions with a name


def module_name(hlo_text: str) -> str:
    match = _MODULE.match(hlo_text)
    return match[1] if match else ""


def instruction_names(hlo_text: str) -> dict[str, str]:
    """Returns instruction -> op_name; a fusion or call without one takes the commonest of what it calls."""
    names: dict[str, str] = {}
    inside: dict[str, list[str]] = collections.defaultdict(list)
    calls: dict[str, str] = {}
    computation = ""
    for line in hlo_text.splitlines():
        instruction = _INSTRUCTION.match(line)
        if instruction is None:
            header = _COMPUTATION.match(line)
            computation = header[1] if header else computation
        elif found := _OP_NAME.search(line):
            names[instruction[1]] = found[1]
            inside[computation].append(found[1])
        else:
            names[instruction[1]] = ""
            if called := _CALLS.search(line):
                calls[instruction[1]] = called[1]
    for name, called_name in calls.items():
        known = [op_name for op_name in inside[called_name] if classify(op_name)[0] != Phase.OTHER]
        if known:
            names[name] = collections.Counter(known).most_common(1)[0][0]
    return names


def classify(op_name: str) -> tuple[Phase, str]:
    """Returns phase and scope of an op_name; (Phase.OTHER, "") if it has none."""
    op_name = op_name.split(";")[0]  # merged instructions list several; the first is the one that stayed
    backward = differentiated = False
    for part in _components(op_name):
        backward |= part.startswith("transpose(")
        differentiated |= part.startswith(("jvp(", "transpose("))
        while match := _WRAPPED.match(part):
            part = match[1]
        if part in SCOPES:
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


def read_device_time(profile: Any, hlo_text: str, *, steps: int) -> DeviceTime | None:
    """Reads a `jax.profiler.ProfileData` of `steps` steps; None if it contains nothing of the program."""
    return device_time(*traced_ops(profile, module_name(hlo_text), steps), instruction_names(hlo_text))


def device_time(
    seconds: Mapping[str, float], calls: Mapping[str, float], names: Mapping[str, str]
) -> DeviceTime | None:
    """Sums seconds and calls of each instruction in a step by the phase and scope of its op_name."""
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
        name = op if op in names else by_kernel.get(_kernel_name(op))
        op_name = names.get(name, "") if name else ""
        phase, scope = classify(op_name)
        share = value / busy
        attributed += share if op_name else 0.0
        phases[phase] += share
        scopes[scope, phase] += share
        rows.append(
            {"op": op, "scope": scope, "phase": phase, "share": share, "calls": calls.get(op, 0), "op_name": op_name}
        )
    rows.sort(key=lambda row: -row["share"])
    largest = sorted(scopes.items(), key=lambda item: -item[1])
    table = [{"scope": scope, "phase": phase, "share": share} for (scope, phase), share in largest]
    return DeviceTime(busy, phases, table, rows[:TOP_OPS], attributed)


def _kernel_name(name: str) -> str:
    return re.sub(r"[^0-9A-Za-z]", "_", name)


def traced_ops(profile: Any, module: str, steps: int) -> tuple[dict[str, float], dict[str, float]]:
    """Returns exclusive seconds and calls per step of each instruction of `module`, averaged over devices."""
    planes = list(profile.planes)
    accelerators = [plane for plane in planes if plane.name.startswith("/device:")]
    seconds: dict[str, float] = collections.defaultdict(float)
    calls: collections.Counter = collections.Counter()
    devices = 0
    for plane in accelerators or [plane for plane in planes if plane.name.startswith("/host:")]:
        intervals = []
        for line in _compute_lines(list(plane.lines)):
            found = [event for event in map(_read_event, line.events) if event and _of(event, module, accelerators)]
            calls.update(op for op, *_ in found)
            intervals += exclusive((op, start, end) for op, start, end, _ in found)
        devices += bool(intervals)
        for op, value in shared_time(intervals).items():
            seconds[op] += value
    scale = max(devices, 1) * steps
    return {op: value * 1e-9 / scale for op, value in seconds.items()}, {op: n / scale for op, n in calls.items()}


def _compute_lines(lines: list[Any]) -> list[Any]:
    """Returns the lines of a plane that hold operations; others repeat them by step, module or scope."""
    for prefix in ("Stream", "XLA Ops"):
        chosen = [line for line in lines if line.name.startswith(prefix)]
        if chosen:
            return chosen
    return lines


def _read_event(event: Any) -> tuple[str, float, float, str | None] | None:
    """Returns operation or kernel, start and end in ns, and module; None for marks without a length."""
    length = event.duration_ns
    if length <= 0 or event.name.startswith("end: "):
        return None
    op = module = None
    for key, value in event.stats:
        if key == "hlo_op":
            op = value
        elif key == "hlo_module":
            module = value
    return str(op or event.name), event.start_ns, event.start_ns + length, module if op else (module or "")


def _of(event: tuple[str, float, float, str | None], module: str, accelerators: Any) -> bool:
    # Events without an instruction are bookkeeping on a host plane, and work on an accelerator: copies, command
    # buffers, kernels of libraries.
    return event[3] == module or (bool(accelerators) and not event[3])


def exclusive(events: Iterable[tuple[str, float, float]]) -> list[tuple[str, float, float]]:
    """Cuts nested events of one line into disjoint pieces, each charged to the innermost event."""
    pieces: list[tuple[str, float, float]] = []
    open_events: list[tuple[str, float]] = []  # operation, end
    at = 0.0
    final = ("", float("inf"), float("inf"))  # closes what is still open
    for op, start, end in [*sorted(events, key=lambda event: (event[1], -event[2])), final]:
        while open_events and open_events[-1][1] <= start:
            inner, inner_end = open_events.pop()
            if inner_end > at:
                pieces.append((inner, at, inner_end))
                at = inner_end
        if open_events and start > at:
            pieces.append((open_events[-1][0], at, start))
        at = max(at, start)
        open_events.append((op, end))
    return pieces


def shared_time(pieces: Iterable[tuple[str, float, float]]) -> dict[str, float]:
    """Returns time by operation over all lines of a device; simultaneous operations share it equally."""
    changes = []
    for op, start, end in pieces:
        changes.append((start, 1, op))
        changes.append((end, -1, op))
    changes.sort(key=lambda change: (change[0], change[1]))
    time: dict[str, float] = collections.defaultdict(float)
    running: collections.Counter = collections.Counter()
    count, since = 0, 0.0
    for at, change, op in changes:
        if count and at > since:
            part = (at - since) / count
            for name, times in running.items():
                time[name] += part * times
        since = at
        count += change
        running[op] += change
        if not running[op]:
            del running[op]
    return dict(time)
