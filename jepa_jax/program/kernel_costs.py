"""What each instruction of a compiled program multiplies and moves, from its text."""

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import NamedTuple

BYTES = {"pred": 1, "s64": 8, "u64": 8, "f64": 8, "c64": 8, "c128": 16, "bf16": 2, "token": 0, "opaque": 0}
NO_TRAFFIC = frozenset(
    ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call")
)

_LINE = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = ")
_HEADER = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$")
_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,<=]*)\]")
_NAME = re.compile(r"%([\w.\-]+)")


class Cost(NamedTuple):
    """Of one run of an instruction."""

    flops: int  # of matrix products and convolutions
    bytes: int  # of operands and results, as if nothing stayed in the cache


@dataclasses.dataclass(frozen=True)
class Line:
    """An instruction: its arrays as (type, extents), its kind, what it reads and everything after that."""

    arrays: list[tuple[str, list[int]]]
    opcode: str
    operands: list[str]
    attributes: str

    @property
    def extents(self) -> list[int]:
        return self.arrays[0][1] if self.arrays else []

    @property
    def num_bytes(self) -> int:
        """Bytes of the result; of a library's call without the scratch memory that is returned with it."""
        is_call = self.opcode == "custom-call"
        kept = [a for i, a in enumerate(self.arrays) if not (is_call and i and a[0] in ("s8", "u8"))]
        return sum(_type_bytes(kind) * math.prod(extents) for kind, extents in kept)

    def find(self, pattern: str) -> str:
        found = re.search(pattern, self.attributes)
        return found[1] if found else ""


Computation = Mapping[str, Line]


def kernel_costs(hlo_text: str) -> dict[str, Cost]:
    """Returns the cost of every instruction of what `compiled.as_text()` returns, by its name."""
    computations = _read(hlo_text)
    costs = {}
    for inside in computations.values():
        for name, line in inside.items():
            if line.opcode in NO_TRAFFIC:
                continue
            fused = computations.get(line.find(r"\bcalls=%?([\w.\-]+)"), {}) if line.opcode == "fusion" else {}
            flops = sum(_flops(one, fused) for one in fused.values()) if fused else _flops(line, inside)
            costs[name] = Cost(flops, line.num_bytes + _operand_bytes(line, inside, fused))
    return costs


def _read(hlo_text: str) -> dict[str, dict[str, Line]]:
    computations: dict[str, dict[str, Line]] = {}
    current: dict[str, Line] = {}
    for text in hlo_text.splitlines():
        if start := _LINE.match(text):
            line = _read_line(text[start.end() :])
            if line is not None:
                current[start[1]] = line
        elif header := _HEADER.match(text):
            current = computations.setdefault(header[1], {})
    return computations


def _read_line(rest: str) -> Line | None:
    shape_end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.find(" ")
    shape, rest = rest[:shape_end], rest[shape_end:].lstrip()
    opcode, opened, _ = rest.partition("(")
    if not opened:
        return None
    end = _closing(rest, len(opcode))
    arrays = [(kind, [int(n.lstrip("<=")) for n in extents.split(",") if n]) for kind, extents in _ARRAY.findall(shape)]
    inside = rest[len(opcode) + 1 : end]
    return Line(arrays, opcode, _NAME.findall(inside) or [inside], rest[end + 1 :])


def _closing(text: str, opening: int) -> int:
    depth = 0
    for place in range(opening, len(text)):
        depth += (text[place] == "(") - (text[place] == ")")
        if depth == 0:
            return place
    return len(text) - 1


def _type_bytes(kind: str) -> int:
    if kind in BYTES:
        return BYTES[kind]
    bits = re.search(r"\d+", kind)
    return max(1, int(bits[0]) // 8) if bits else 1


def _flops(line: Line, inside: Computation) -> int:
    target = line.find(r'custom_call_target="([^"]*)"')
    shapes = [inside[name].extents for name in line.operands[:2] if name in inside]
    if len(shapes) < 2:
        return 0
    if line.opcode == "dot" or "cublas" in target or "gemm" in target:
        contracted = line.find(r"lhs_contracting_dims=\{([\d,]*)\}")
        contracted = contracted or line.find(r'"lhs_contracting_dimensions":\[([^\]]*)\]')
        axes = [int(axis) for axis in re.findall(r"\d+", contracted)]
        return 2 * math.prod(line.extents) * math.prod(shapes[0][axis] for axis in axes)
    if line.opcode == "convolution" or "cudnn$conv" in target:
        output = line.find(r"dim_labels=\w+_(\w+)->").find("o")
        # Of the forward convolution that a gradient belongs to: its kernel, and its result.
        kernel, result = shapes[1], line.extents
        if "BackwardInput" in target:
            result = shapes[0]
        elif "BackwardFilter" in target:
            kernel, result = line.extents, shapes[1]
        return 2 * math.prod(result) * math.prod(kernel) // max(kernel[output], 1)
    return 0


def _operand_bytes(line: Line, inside: Computation, fused: Computation) -> int:
    """Returns what an instruction reads; of an operand that a fusion only slices, the slices."""
    parameters = {one.operands[0]: name for name, one in fused.items() if one.opcode == "parameter"}
    total = 0
    for index, name in enumerate(line.operands):
        inner = parameters.get(str(index))
        uses = [one for one in fused.values() if inner and inner in one.operands]
        if uses and all(one.opcode in ("dynamic-slice", "gather") and one.operands[0] == inner for one in uses):
            total += sum(one.num_bytes for one in uses)
        elif name in inside:
            total += inside[name].num_bytes
    return total
