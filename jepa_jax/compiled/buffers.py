"""Reads which buffers are alive when a compiled program needs the most memory, and which line made each.

XLA writes down where every value is placed and from which instruction to which it lives. Values that live at the same
time never share a place, so those alive at one instruction add up to the memory in use there.
"""

import collections
import dataclasses
import itertools
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jepa_jax.base.errors import UserError
from jepa_jax.compiled.hlo import CompiledProgram, Instruction

ARGUMENTS, KEPT, BACKWARD, OTHER, OUTPUTS = (
    "arguments", "kept for the backward pass", "gradients and temporaries of the backward pass",
    "temporaries of the forward pass and the update", "outputs and constants",
)  # fmt: skip
_ALLOCATION = re.compile(r"allocation \d+: size (\d+), (.*):$")
_VALUE = re.compile(r" value: <\d+ (.+?)(\{[\d,]*\})? @\d+> \(size=(\d+),offset=(\d+)\): (.*)$")
_RANGE = re.compile(r"    (.+?)(\{[\d,]*\}):(\d+)-(\d+)$")
_LIBRARIES = re.compile(r"site-packages|dist-packages|<frozen|^<")
_WRAPPERS = re.compile(r"(?:jit|jvp|transpose|vmap|checkpoint|rematted_computation|custom_vjp_call)\(?")

Range = tuple[int, int]  # first and last instruction at which a value is alive


@dataclasses.dataclass(frozen=True)
class Buffer:
    """A value that is alive at the peak."""

    name: str  # of the instruction that makes it, or of the argument
    shape: str
    bytes: int
    group: str  # ARGUMENTS, KEPT, BACKWARD, OTHER or OUTPUTS
    op_name: str  # where it was written, as JAX names it
    source: str  # file:line of the user's code, if known


@dataclasses.dataclass(frozen=True)
class Peak:
    """The buffers alive at the peak, the largest first; together they are the peak."""

    buffers: list[Buffer]

    @property
    def bytes(self) -> int:
        return sum(buffer.bytes for buffer in self.buffers)

    def totals(self, *, by: str) -> dict[str, int]:
        """Returns the bytes of each "group", or those that each "source" line made, the largest first."""
        totals: collections.Counter[str] = collections.Counter()
        for buffer in self.buffers:
            key = buffer.group if buffer.group in (ARGUMENTS, OUTPUTS) else getattr(buffer, by)
            totals[key or "unknown"] += buffer.bytes
        return dict(totals.most_common())


def read_peak(folder: pathlib.Path, program: CompiledProgram, frames: Mapping[int, str]) -> Peak:
    """Returns the peak of a program whose notes XLA wrote to a folder; `frames` are those of `source_lines`."""
    ranges = _live_ranges(_notes(folder, "live-range"))
    fixed, shared = _allocations(_notes(folder, "buffer-assignment"))
    moment = _fullest(shared, ranges)
    never = (moment + 1, moment)
    spans = [(value, *ranges.get(value.name, never)) for value in shared]
    alive = [value for value, first, last in spans if first <= moment <= last]
    instructions = {i.name: i for computation in program.computations.values() for i in computation.values()}
    buffers = [_buffer(value, instructions, frames) for value in [*fixed, *alive]]
    return Peak(sorted((buffer for buffer in buffers if buffer.bytes), key=lambda buffer: -buffer.bytes))


def _notes(folder: pathlib.Path, kind: str) -> str:
    paths = sorted(folder.glob(f"*after_optimizations-{kind}.txt"))
    if not paths:
        raise UserError("XLA wrote no notes about its buffers: this version of its compiler cannot tell what is alive")
    return max(paths, key=lambda path: path.stat().st_size).read_text()  # of several modules, the step is the largest


def _fullest(values: Sequence["Placed"], ranges: Mapping[str, Range]) -> int:
    """Returns the moment at which the values that are alive take the most memory."""
    changes: collections.Counter[int] = collections.Counter()
    for value in values:
        if span := ranges.get(value.name):
            changes[span[0]] += value.bytes
            changes[span[1] + 1] -= value.bytes
    times = sorted(changes)
    used = list(itertools.accumulate(changes[time] for time in times))
    return times[used.index(max(used))] if used else 0


def _live_ranges(text: str) -> dict[str, Range]:
    start = max(0, text.find("BufferLiveRange:"))
    end = text.find("Live ranges at", start)
    lines = text[start : end if end > 0 else None].splitlines()
    return {f"{m[1]}{m[2]}": (int(m[3]), int(m[4])) for m in map(_RANGE.match, lines) if m}


class Placed(NamedTuple):
    """A value and its place: a parameter, an output, or memory that values share."""

    name: str  # with its index in a tuple
    shape: str
    bytes: int
    kind: str  # "parameter", "output" or "shared"


def _allocations(text: str) -> tuple[list[Placed], list[Placed]]:
    """Returns allocations that last for the whole call, and the values that share the rest.

    What only names an allocation is optional: XLA does not promise the form of its notes.
    """
    fixed: list[Placed] = []
    shared: list[Placed] = []
    is_shared = waiting = False
    for line in text.splitlines():
        if allocation := _ALLOCATION.match(line):
            kind = allocation[2]
            is_shared = "preallocated-temp" in kind
            waiting = not is_shared and "thread-local" not in kind
            if waiting:
                shape = re.search(r"shape \|(.*?)\|", kind)
                place = "parameter" if "parameter" in kind else "output"
                fixed.append(Placed(kind.partition(",")[0], shape[1] if shape else "", int(allocation[1]), place))
        elif (is_shared or waiting) and (value := _VALUE.match(line)):
            name, shape_text = f"{value[1]}{value[2] or '{}'}", value[5]
            if is_shared:
                shared.append(Placed(name, shape_text, int(value[3]), "shared"))
            else:  # named after the first value that is placed there
                fixed[-1] = fixed[-1]._replace(name=name, shape=shape_text)
                waiting = False
    return fixed, shared


def _buffer(value: Placed, instructions: Mapping[str, Instruction], frames: Mapping[int, str]) -> Buffer:
    instruction = instructions.get(value.name.partition("{")[0])
    scope = instruction.scope if instruction else ""
    if value.kind != "shared":
        group = ARGUMENTS if value.kind == "parameter" else OUTPUTS
        return Buffer(scope or value.name, value.shape, value.bytes, group, scope, "")
    source = frames.get(int(instruction.search(r"stack_frame_id=(\d+)") or 0), "") if instruction else ""
    group = BACKWARD if "transpose(" in scope else KEPT if "jvp(" in scope else OTHER
    return Buffer(value.name, value.shape, value.bytes, group, scope, source)


def short_scope(scope: str) -> str:
    """Returns the place of an operation without the names of JAX's transformations."""
    parts = (_WRAPPERS.sub("", part).strip("()") for part in scope.split("/"))
    return "/".join(part for part in parts if part)


def source_lines(text: str) -> dict[int, str]:
    """Returns file:line of each frame of a compiled program's text: the innermost one outside of libraries."""
    files = dict(_rows(text, "FileNames", r'"(.*)"'))
    lines = dict(_rows(text, "FileLocations", r"\{file_name_id=(\d+).*?\bline=(\d+)"))
    places = {place: (files.get(file, "?"), line) for place, (file, line) in lines.items()}
    frames = dict(_rows(text, "StackFrames", r"\{file_location_id=(\d+)(?: parent_frame_id=(\d+))?"))
    found = {}
    for number in frames:
        at, seen = number, set[str]()
        while at in frames and at not in seen:
            seen.add(at)
            file, line = places.get(frames[at][0], ("?", "0"))
            if not _LIBRARIES.search(file):
                found[int(number)] = f"{pathlib.PurePath(file).name}:{line}"
                break
            at = frames[at][1]
    return found


def _rows(text: str, name: str, pattern: str) -> Iterator[tuple[str, Any]]:
    """Yields number and fields of each line of one of the tables that a program's text starts with."""
    table = re.search(rf"^{name}\n((?:\d+ .*\n)*)", text, re.MULTILINE)
    for row in re.finditer(rf"^(\d+) {pattern}", table[1] if table else "", re.MULTILINE):
        yield row[1], row[2] if row.re.groups == 2 else row.groups()[1:]
