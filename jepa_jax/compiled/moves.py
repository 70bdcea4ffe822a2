"""Kernels of a compiled program that only move numbers: layout changes, copies, and changes of precision."""

from collections.abc import Iterator
from typing import NamedTuple

from jepa_jax.compiled.hlo import ARRAY, CompiledProgram, Computation, Instruction, shape_bytes

SMALLEST = 2**16  # bytes; smaller kernels cost their launch
TRANSPOSE, CONVERT, COPY, FLOAT32 = "transpose", "convert", "copy", "float32"
MOVES = frozenset(("copy", "transpose", "convert", "parameter", "bitcast", "reshape", "tuple", "get-tuple-element"))
OF_PARAMETERS = ("optimizer", "ema")


class Move(NamedTuple):
    """A kernel that moves numbers, and the bytes that all its runs move; of FLOAT32 those of wide results."""

    kind: str
    instruction: Instruction
    times: int
    num_bytes: int


def moves(program: CompiledProgram) -> Iterator[Move]:
    """Yields the kernels of a program that do no arithmetic, and those that write activations in float32."""
    for instruction, inside, times in program.runs():
        moved = program.kernel_bytes(instruction, inside)
        kind = kind_of(program, instruction, inside) if moved >= SMALLEST else ""
        if kind:
            yield Move(kind, instruction, times, times * (float32_bytes(instruction) if kind == FLOAT32 else moved))


def transposed_share(program: CompiledProgram) -> float:
    """Returns the share of all bytes moved by kernels that only change the order of axes."""
    return sum(move.num_bytes for move in moves(program) if move.kind == TRANSPOSE) / max(1, program.bytes_moved())


def kind_of(program: CompiledProgram, instruction: Instruction, inside: Computation) -> str:
    """Returns the kind of waste that a kernel is, or an empty string."""
    body = {instruction.name: instruction}
    if instruction.opcode == "fusion":
        body = program.computations.get(instruction.called("calls"), {})
    elif instruction.opcode in ("copy", "transpose", "convert"):
        body = {**{name: inside[name] for name in instruction.operands if name in inside}, **body}
    opcodes = {one.opcode for one in body.values()}
    if instruction.opcode in ("fusion", "copy", "transpose", "convert") and opcodes <= MOVES:
        if "transpose" in opcodes or _layout_changes(instruction, inside):
            return TRANSPOSE
        return CONVERT if "convert" in opcodes else COPY
    of_parameters = any(f"/{part}/" in instruction.scope for part in OF_PARAMETERS)
    is_wide = instruction.opcode == "fusion" and float32_bytes(instruction) >= SMALLEST
    return FLOAT32 if is_wide and not of_parameters else ""


def float32_bytes(instruction: Instruction) -> int:
    """Returns the bytes of float32 arrays that a kernel writes."""
    return sum(shape_bytes(array[0]) for array in ARRAY.finditer(instruction.shape) if array[1] == "f32")


def _layout_changes(instruction: Instruction, inside: Computation) -> bool:
    def order(shape: str) -> str:
        return shape.partition("{")[2].partition("}")[0].partition(":")[0]

    return any(
        name in inside and order(inside[name].shape) != order(instruction.shape) for name in instruction.operands
    )
