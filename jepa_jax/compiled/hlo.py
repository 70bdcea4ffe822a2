"""Reads the text of a compiled program: bytes moved, collectives, types of its products, names, calls to the host.

A loop body counts as often as it runs; of the branches of a conditional, the most expensive one counts.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

# Instructions that name or group values without touching them, and those whose parts are counted instead.
FREE = frozenset((
    "parameter", "get-tuple-element", "tuple", "bitcast", "constant", "after-all", "partition-id", "replica-id",
    "optimization-barrier", "domain", "iota", "while", "conditional", "call", "async-start",
))  # fmt: skip
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")
HOST_OPCODES = frozenset(("infeed", "outfeed", "send", "recv"))
HOST_TARGET = re.compile(r"callback|host_compute|HostExecute", re.IGNORECASE)
CONVOLUTION_TARGET = re.compile(r"cudnn\$conv", re.IGNORECASE)
MATMUL_TARGET = re.compile(r"cublas|\$gemm|__triton.*gemm|fmha", re.IGNORECASE)

ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,<=]*)\]")
_NAME = re.compile(r"%([\w.\-]+)")
_MODULE = re.compile(r"^HloModule ([\w.\-]+)")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_ASSIGNMENT = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str
    is_root: bool

    def search(self, pattern: str) -> str:
        """Returns the first group of a pattern in the attributes, or an empty string."""
        match = re.search(pattern, self.attributes)
        return match.group(1) if match else ""

    def called(self, attribute: str) -> str:
        """Returns the computation that an attribute names."""
        return self.search(rf"\b{attribute}=%?([\w.\-]+)")

    @property
    def target(self) -> str:
        return self.search(r'custom_call_target="([^"]*)"')

    @property
    def scope(self) -> str:
        """Where the program was written: jit(step)/jvp(encoder)/..."""
        return self.search(r'op_name="([^"]*)"')

    @property
    def num_bytes(self) -> int:
        return shape_bytes(self.shape)

    @property
    def product_kind(self) -> str:
        """ "convolution", "matmul", or empty for other instructions."""
        custom = self.target if self.opcode == "custom-call" else ""
        if self.opcode == "convolution" or CONVOLUTION_TARGET.search(custom):
            return "convolution"
        return "matmul" if self.opcode in ("dot", "scaled-dot") or MATMUL_TARGET.search(custom) else ""


Computation = dict[str, Instruction]


class Product(NamedTuple):
    """A convolution or matrix product: the types it multiplies, and where it was written."""

    kind: str
    types: tuple[str, ...]
    scope: str


@dataclasses.dataclass(frozen=True)
class CompiledProgram:
    """A parsed program; `entry` names the computation that is called, `name` the module."""

    computations: dict[str, Computation]
    entry: str
    name: str = ""

    def runs(self, name: str = "", times: int = 1) -> Iterator[tuple[Instruction, Computation, int]]:
        """Yields every instruction that is executed by itself (fused ones are not), and how often it runs."""
        computation = self.computations[name or self.entry]
        for instruction in computation.values():
            yield instruction, computation, times
            if instruction.opcode == "while":
                trips = int(instruction.search(r'"known_trip_count":\{"n":"(\d+)"') or 1)
                yield from self.runs(instruction.called("body"), times * trips)
            elif instruction.opcode == "conditional":
                yield from self.runs(self._most_expensive_branch(instruction), times)
            elif instruction.opcode in ("call", "async-start"):
                called = instruction.called("to_apply") or instruction.called("calls")
                if called in self.computations:
                    yield from self.runs(called, times)

    def _most_expensive_branch(self, instruction: Instruction) -> str:
        names = _NAME.findall(instruction.search(r"branch_computations=\{([^}]*)\}"))
        names = names or [instruction.called("true_computation"), instruction.called("false_computation")]
        return max(filter(None, names), key=self.bytes_moved)

    def bytes_moved(self, name: str = "") -> int:
        """Returns the bytes that kernels read and write: operands and results, as if nothing stayed in the cache."""
        return sum(self.kernel_bytes(instruction, inside) * times for instruction, inside, times in self.runs(name))

    def kernel_bytes(self, instruction: Instruction, computation: Computation) -> int:
        """Returns the bytes that an instruction reads and writes by itself; of loops and calls their parts count."""
        opcode = instruction.opcode
        if opcode in FREE or opcode.endswith("-done"):
            return 0
        if opcode == "fusion":
            return self._fusion_bytes(instruction, computation)
        if opcode == "dynamic-slice":
            return 2 * instruction.num_bytes
        if opcode == "dynamic-update-slice":
            return 2 * computation[instruction.operands[1]].num_bytes
        if opcode == "gather":  # reads what it returns, not the whole table
            return 2 * instruction.num_bytes + operand_bytes(instruction.operands[1:], computation)
        return instruction.num_bytes - workspace_bytes(instruction) + operand_bytes(instruction.operands, computation)

    def _fusion_bytes(self, instruction: Instruction, computation: Computation) -> int:
        """Returns the bytes of a fusion: of an operand that it only slices, or updates in place, those of the slice."""
        fused = self.computations.get(instruction.called("calls"), {})
        parameters = {int(inner.operands[0]): inner.name for inner in fused.values() if inner.opcode == "parameter"}
        moved = 0
        for index, name in enumerate(instruction.operands):
            parameter = parameters.get(index, "")
            uses = [inner for inner in fused.values() if parameter in inner.operands]
            kinds = {use.opcode if use.operands[0] == parameter else "other" for use in uses}
            if kinds == {"dynamic-slice"}:
                moved += sum(use.num_bytes for use in uses)
            elif kinds != {"dynamic-update-slice"}:  # what is written in place is counted with the result
                moved += operand_bytes([name], computation)
        updates = [inner.operands[1] for inner in fused.values() if inner.opcode == "dynamic-update-slice"]
        roots = {inner.opcode for inner in fused.values() if inner.is_root}
        in_place = updates and roots <= {"dynamic-update-slice", "tuple"}
        return moved + (operand_bytes(updates, fused) if in_place else instruction.num_bytes)

    def collectives(self) -> dict[str, list[int]]:
        """Returns for each kind of exchange between devices its count per step and the bytes that a device sends."""
        totals: dict[str, list[float]] = {}
        for instruction, computation, times in self.runs():
            kind = instruction.opcode.removesuffix("-start")
            if kind in COLLECTIVES:
                total = totals.setdefault(kind, [0, 0.0])
                total[0] += times
                total[1] += times * wire_bytes(instruction, computation, kind)
        return {kind: [round(count), round(sent)] for kind, (count, sent) in sorted(totals.items())}

    def products(self) -> list[Product]:
        """Returns every convolution and matrix product of the program, including those inside fusions."""
        fusions = {i.called("calls"): i.scope for _, _, i in self._all() if i.opcode == "fusion"}
        found = []
        for name, computation, instruction in self._all():
            if kind := instruction.product_kind:
                shapes = [computation[operand].shape for operand in instruction.operands[:2] if operand in computation]
                types = tuple(ARRAY.findall(shape)[0][0] for shape in shapes)
                found.append(Product(kind, types, instruction.scope or fusions.get(name, "")))
        return found

    def op_names(self, is_known: Callable[[str], bool]) -> dict[str, str]:
        """Returns the op_name of each instruction; a fusion without one takes the commonest of its known parts."""
        names = {}
        for _, _, instruction in self._all():
            names[instruction.name] = instruction.scope
            called = instruction.called("calls") or instruction.called("to_apply")
            if called and not instruction.scope:
                inside = [part.scope for part in self.computations.get(called, {}).values() if is_known(part.scope)]
                names[instruction.name] = collections.Counter(inside).most_common(1)[0][0] if inside else ""
        return names

    def host_calls(self) -> list[str]:
        """Returns the instructions that wait for the host: callbacks, infeeds, outfeeds."""
        return [
            instruction.target or instruction.opcode
            for _, _, instruction in self._all()
            if instruction.opcode.split("-")[0] in HOST_OPCODES or HOST_TARGET.search(instruction.target)
        ]

    def largest_convolution_bytes(self) -> int:
        """Returns the bytes of operands and result of the largest convolution, a measure of its workspace."""
        kernels = [(i, inside) for i, inside, _ in self.runs() if i.product_kind == "convolution"]
        return max((self.kernel_bytes(*kernel) for kernel in kernels), default=0)

    def _all(self) -> Iterator[tuple[str, Computation, Instruction]]:
        for name, computation in self.computations.items():
            for instruction in computation.values():
                yield name, computation, instruction


def parse_hlo(text: str) -> CompiledProgram:
    """Parses what `compiled.as_text()` returns."""
    computations: dict[str, Computation] = {}
    current: Computation = {}
    entry = ""
    for line in text.splitlines():
        if header := _HEADER.match(line):
            current = computations.setdefault(header.group(2), {})
            entry = header.group(2) if header.group(1) else entry
        elif start := _ASSIGNMENT.match(line):
            current[start.group(2)] = _parse_instruction(start.group(2), bool(start.group(1)), line[start.end() :])
    module = _MODULE.match(text)
    return CompiledProgram(computations, entry, module[1] if module else "")


def _parse_instruction(name: str, is_root: bool, rest: str) -> Instruction:
    shape_end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    shape, rest = rest[:shape_end], rest[shape_end:].lstrip()
    opcode = rest.partition("(")[0]
    end = _closing(rest, len(opcode))
    inside = rest[len(opcode) + 1 : end]
    operands = tuple(_NAME.findall(inside)) or ((inside,) if opcode == "parameter" else ())
    return Instruction(name, shape, opcode, operands, rest[end + 1 :], is_root)


def _closing(text: str, opening: int) -> int:
    """Returns the position at which the bracket that opens at `opening` closes."""
    depth = 0
    for place in range(opening, len(text)):
        depth += (text[place] == "(") - (text[place] == ")")
        if depth == 0:
            return place
    raise ValueError(f"unbalanced brackets: {text[:80]}")


def operand_bytes(names: Iterable[str], computation: Computation) -> int:
    """Returns the bytes of the named instructions of a computation."""
    return sum(computation[name].num_bytes for name in names if name in computation)


def workspace_bytes(instruction: Instruction) -> int:
    """Returns the bytes of a library call's result that are its scratch memory, which is no traffic."""
    if instruction.opcode != "custom-call" or not instruction.product_kind:
        return 0
    parts = [array[0] for array in ARRAY.finditer(instruction.shape)][1:]
    return sum(shape_bytes(part) for part in parts if part.startswith(("s8[", "u8[")))


def shape_bytes(shape: str) -> int:
    """Returns the bytes of the arrays of a shape."""
    total = 0
    for name, extents in ARRAY.findall(shape):
        digits = re.match(r"[a-z]+(\d+)", name)  # of bf16, f8e4m3, s32; tokens have none and no size
        bits = 8 if name == "pred" else int(digits[1]) if digits else 0
        numbers = math.prod(int(extent.lstrip("<=")) for extent in extents.split(",") if extent)
        total += -(-numbers * bits // 8)
    return total


def group_size(attributes: str) -> int:
    """Returns how many devices take part in one exchange.

    XLA writes it in three ways: `{{0,1},{2,3}}`, `[groups,devices]<=[...]`, or axes of a mesh,
    `mesh['a'=4,'b'=2] {'a'}`.
    """
    if mesh := re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", attributes):
        sizes = dict(re.findall(r"'([^']+)'=(\d+)", mesh.group(1)))
        parts = dict(re.findall(r"'([^']+)':\(\d+\)(\d+)", mesh.group(2)))  # only a part of an axis
        return math.prod(int(parts.get(name) or sizes[name]) for name in re.findall(r"'([^']+)'", mesh.group(2)))
    if iota := re.search(r"replica_groups=\[(\d+),(\d+)\]", attributes):
        return int(iota.group(2))
    listed = re.search(r"replica_groups=\{\{([\d,]*)\}", attributes)
    return len(listed.group(1).split(",")) if listed else 1


def wire_bytes(instruction: Instruction, computation: Computation, kind: str) -> float:
    """Returns what one device sends in ring algorithms, a lower bound for any other."""
    operands = operand_bytes(instruction.operands, computation)
    devices = group_size(instruction.attributes)
    share = (devices - 1) / devices
    factors = {"all-reduce": 2 * share, "all-gather": devices - 1, "reduce-scatter": share, "all-to-all": share}
    return factors.get(kind, 1.0) * operands
