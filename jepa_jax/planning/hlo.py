"""Reads a compiled program: bytes its kernels move, its collectives, the types of its products, calls to the host.

Of the text that `compiled.as_text()` gives. A loop body counts as often as it runs; of a branch the dearest one counts.
"""

import dataclasses
import math
import re
from collections.abc import Iterator

TYPE_BITS = {
    "pred": 8, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "s32": 32, "u32": 32, "s64": 64, "u64": 64,
    "f16": 16, "bf16": 16, "f32": 32, "f64": 64, "c64": 64, "c128": 128, "token": 0, "opaque": 0,
}  # fmt: skip
# Instructions that name or group values without touching them.
FREE = frozenset((
    "parameter", "get-tuple-element", "tuple", "bitcast", "constant", "after-all", "partition-id", "replica-id",
    "optimization-barrier", "domain", "iota",
))  # fmt: skip
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")
HOST_OPCODES = frozenset(("infeed", "outfeed", "send", "recv"))
HOST_TARGET = re.compile(r"callback|host_compute|HostExecute", re.IGNORECASE)
CONVOLUTION_TARGET = re.compile(r"cudnn\$conv", re.IGNORECASE)
MATMUL_TARGET = re.compile(r"cublas|\$gemm|__triton.*gemm|fmha", re.IGNORECASE)

_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,<=]*)\]")
_NAME = re.compile(r"%([\w.\-]+)")
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

    def attribute(self, name: str) -> str | None:
        """The computation or value that `name=` points to."""
        match = re.search(rf"\b{name}=%?([\w.\-]+)", self.attributes)
        return match.group(1) if match else None

    @property
    def target(self) -> str:
        match = re.search(r'custom_call_target="([^"]*)"', self.attributes)
        return match.group(1) if match else ""

    @property
    def scope(self) -> str:
        """Where the program was written: jit(step)/jvp(encoder)/..."""
        match = re.search(r'op_name="([^"]*)"', self.attributes)
        return match.group(1) if match else ""

    @property
    def num_bytes(self) -> int:
        return shape_bytes(self.shape)


Computation = dict[str, Instruction]


@dataclasses.dataclass(frozen=True)
class Product:
    """A convolution or matrix product: the types it multiplies, and where it was written."""

    kind: str  # convolution or matmul
    types: tuple[str, ...]
    scope: str


@dataclasses.dataclass(frozen=True)
class Collective:
    """A kind of exchange between devices: how often a step does it and what a device sends, in bytes."""

    kind: str
    count: int
    wire_bytes: int


@dataclasses.dataclass(frozen=True)
class Module:
    """A parsed program."""

    computations: dict[str, Computation]
    entry: str

    def runs(self) -> Iterator[tuple[Instruction, Computation, int]]:
        """Every instruction that is executed by itself (fused ones are not), and how often."""
        yield from self._runs(self.entry, 1)

    def _runs(self, name: str, times: int) -> Iterator[tuple[Instruction, Computation, int]]:
        computation = self.computations[name]
        for instruction in computation.values():
            yield instruction, computation, times
            if instruction.opcode == "while":
                body = instruction.attribute("body")
                yield from self._runs(str(body), times * trip_count(instruction))
            elif instruction.opcode == "conditional":
                yield from self._runs(self._dearest_branch(instruction), times)
            elif instruction.opcode in ("call", "async-start"):
                called = instruction.attribute("to_apply") or instruction.attribute("calls")
                if called in self.computations:
                    yield from self._runs(called, times)

    def _dearest_branch(self, instruction: Instruction) -> str:
        listed = re.search(r"branch_computations=\{([^}]*)\}", instruction.attributes)
        names = _NAME.findall(listed.group(1)) if listed else [
            name for key in ("true_computation", "false_computation") if (name := instruction.attribute(key))
        ]  # fmt: skip
        return max(names, key=lambda name: sum(self.kernel_bytes(i, c) * n for i, c, n in self._runs(name, 1)))

    def bytes_moved(self) -> int:
        """Bytes that the kernels of one step read and write: operands and results, as if nothing stayed cached."""
        return sum(
            self.kernel_bytes(instruction, computation) * times for instruction, computation, times in self.runs()
        )

    def kernel_bytes(self, instruction: Instruction, computation: Computation) -> int:
        opcode = instruction.opcode
        if opcode in FREE or opcode in ("while", "conditional", "call", "async-start") or opcode.endswith("-done"):
            return 0
        if opcode == "fusion":
            return self._fusion_bytes(instruction, computation)
        if opcode == "dynamic-slice":
            return 2 * instruction.num_bytes
        if opcode == "dynamic-update-slice":
            return 2 * computation[instruction.operands[1]].num_bytes
        return instruction.num_bytes + sum(_operand_bytes(name, computation) for name in instruction.operands)

    def _fusion_bytes(self, instruction: Instruction, computation: Computation) -> int:
        """A fusion that only slices an operand, or updates a slice of it in place, moves the slice alone."""
        fused = self.computations.get(str(instruction.attribute("calls")), {})
        readers: dict[str, list[Instruction]] = {}
        for inner in fused.values():
            for name in inner.operands:
                readers.setdefault(name, []).append(inner)
        parameters = {
            int(inner.operands[0]): inner.name for inner in fused.values() if inner.opcode == "parameter"
        }  # fmt: skip
        moved = 0
        for index, name in enumerate(instruction.operands):
            parameter = parameters.get(index, "")
            uses = readers.get(parameter, [])
            kinds = {use.opcode if use.operands[0] == parameter else "other" for use in uses}
            if kinds == {"dynamic-slice"}:
                moved += sum(use.num_bytes for use in uses)
            elif kinds == {"dynamic-update-slice"}:
                moved += 0  # in place: what is written is counted with the result
            else:
                moved += _operand_bytes(name, computation)
        updates = [inner for inner in fused.values() if inner.opcode == "dynamic-update-slice"]
        if updates and all(
            inner.opcode in ("dynamic-update-slice", "tuple") for inner in fused.values() if inner.is_root
        ):
            return moved + sum(fused[inner.operands[1]].num_bytes for inner in updates if inner.operands[1] in fused)
        return moved + instruction.num_bytes

    def collectives(self) -> list[Collective]:
        """By kind, the exchanges of one step."""
        totals: dict[str, tuple[int, float]] = {}
        for instruction, computation, times in self.runs():
            kind = instruction.opcode.removesuffix("-start")
            if kind in COLLECTIVES:
                count, sent = totals.get(kind, (0, 0.0))
                totals[kind] = count + times, sent + times * wire_bytes(instruction, computation, kind)
        return [Collective(kind, count, round(sent)) for kind, (count, sent) in sorted(totals.items())]

    def products(self) -> list[Product]:
        """Every convolution and matrix product of the program, also those inside fusions."""
        found = []
        scopes = {
            str(instruction.attribute("calls")): instruction.scope
            for computation in self.computations.values()
            for instruction in computation.values()
            if instruction.opcode == "fusion"
        }
        for name, computation in self.computations.items():
            for instruction in computation.values():
                kind = _product_kind(instruction)
                if kind:
                    factors = [computation[o].shape for o in instruction.operands[:2] if o in computation]
                    scope = instruction.scope or scopes.get(name, "")
                    found.append(Product(kind, tuple(array_types(shape)[0] for shape in factors), scope))
        return found

    def host_calls(self) -> list[str]:
        """Instructions that stop for the host: callbacks, infeeds, outfeeds."""
        return [
            instruction.target or instruction.opcode
            for computation in self.computations.values()
            for instruction in computation.values()
            if instruction.opcode.split("-")[0] in HOST_OPCODES or HOST_TARGET.search(instruction.target)
        ]

    def largest_convolution_bytes(self) -> int:
        """Operands and result of the largest convolution: a measure for the workspace it may ask for."""
        sizes = [
            self.kernel_bytes(instruction, computation)
            for instruction, computation, _ in self.runs()
            if _product_kind(instruction) == "convolution"
        ]
        return max(sizes, default=0)


def parse_hlo(text: str) -> Module:
    """Computations of an HLO text and the name of the one that is called."""
    computations: dict[str, Computation] = {}
    current: Computation = {}
    entry = ""
    for line in text.splitlines():
        header = _HEADER.match(line)
        if header:
            current = computations.setdefault(header.group(2), {})
            entry = header.group(2) if header.group(1) else entry
            continue
        instruction = _parse_instruction(line)
        if instruction:
            current[instruction.name] = instruction
    if not entry:
        raise ValueError("no ENTRY computation: not the text of a compiled program")
    return Module(computations, entry)


def _parse_instruction(line: str) -> Instruction | None:
    start = _ASSIGNMENT.match(line)
    if not start:
        return None
    rest = line[start.end() :]
    shape_end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    shape, rest = rest[:shape_end], rest[shape_end:].lstrip()
    opcode, _, _ = rest.partition("(")
    end = _closing(rest, len(opcode))
    inside = rest[len(opcode) + 1 : end]
    operands = tuple(_NAME.findall(inside)) or ((inside,) if opcode == "parameter" else ())
    return Instruction(start.group(2), shape, opcode, operands, rest[end + 1 :], bool(start.group(1)))


def _closing(text: str, opening: int) -> int:
    """Where the bracket that opens at `opening` closes."""
    depth = 0
    for place in range(opening, len(text)):
        depth += (text[place] == "(") - (text[place] == ")")
        if depth == 0:
            return place
    raise ValueError(f"unbalanced brackets: {text[:80]}")


def _product_kind(instruction: Instruction) -> str | None:
    if instruction.opcode in ("convolution", "dot", "scaled-dot"):
        return "convolution" if instruction.opcode == "convolution" else "matmul"
    if instruction.opcode == "custom-call":
        if CONVOLUTION_TARGET.search(instruction.target):
            return "convolution"
        if MATMUL_TARGET.search(instruction.target):
            return "matmul"
    return None


def _operand_bytes(name: str, computation: Computation) -> int:
    return computation[name].num_bytes if name in computation else 0


def array_types(shape: str) -> list[str]:
    """Element types of a shape: one, or those of a tuple's parts."""
    return [name for name, _ in _ARRAY.findall(shape)]


def array_sizes(shape: str) -> list[int]:
    """Bytes of the arrays of a shape."""
    sizes = []
    for name, extents in _ARRAY.findall(shape):
        bits = TYPE_BITS.get(name, 8 if name.startswith("f8") else 4 if name.startswith("f4") else 0)
        numbers = math.prod(int(extent.lstrip("<=")) for extent in extents.split(",") if extent)
        sizes.append(-(-numbers * bits // 8))
    return sizes


def shape_bytes(shape: str) -> int:
    return sum(array_sizes(shape))


def trip_count(loop: Instruction) -> int:
    """How often a loop runs, where XLA found out; otherwise once."""
    match = re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes)
    return int(match.group(1)) if match else 1


def group_size(attributes: str) -> int:
    """Devices that take part in one exchange.

    Three ways to write it: `{{0,1},{2,3}}`, `[groups,devices]<=[...]`, or axes of a mesh, `mesh['a'=4,'b'=2] {'a'}`.
    """
    mesh = re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", attributes)
    if mesh:
        sizes = dict(re.findall(r"'([^']+)'=(\d+)", mesh.group(1)))
        parts = dict(re.findall(r"'([^']+)':\(\d+\)(\d+)", mesh.group(2)))  # only a part of an axis
        return math.prod(int(parts.get(name) or sizes[name]) for name in re.findall(r"'([^']+)'", mesh.group(2)))
    iota = re.search(r"replica_groups=\[(\d+),(\d+)\]", attributes)
    if iota:
        return int(iota.group(2))
    listed = re.search(r"replica_groups=\{\{([\d,]*)\}", attributes)
    return len(listed.group(1).split(",")) if listed else 1


def wire_bytes(instruction: Instruction, computation: Computation, kind: str) -> float:
    """What one device sends in ring algorithms; a lower bound for any other."""
    operands = sum(_operand_bytes(name, computation) for name in instruction.operands)
    devices = group_size(instruction.attributes)
    share = (devices - 1) / devices
    if kind == "all-reduce":
        return 2 * share * operands
    if kind == "all-gather":
        return (devices - 1) * operands
    if kind in ("reduce-scatter", "all-to-all"):
        return share * operands
    return operands
