"""Kernels of a compiled program that only move numbers: layout changes, copies, and changes of precision."""

from jepa_jax.compiled.hlo import CompiledProgram, Computation, Instruction

SMALLEST = 2**16  # bytes; smaller kernels cost their launch
TRANSPOSE, CONVERT, COPY = "transpose", "convert", "copy"
MOVES = frozenset(("copy", "transpose", "convert", "parameter", "bitcast", "reshape", "tuple", "get-tuple-element"))


def transposed_share(program: CompiledProgram) -> float:
    """Returns the share of all bytes moved by kernels that only change the order of axes."""
    moved = ((program.kernel_bytes(one, inside), one, inside, times) for one, inside, times in program.runs())
    large = (run for run in moved if run[0] >= SMALLEST)
    transposed = sum(size * times for size, one, inside, times in large if kind_of(program, one, inside) == TRANSPOSE)
    return transposed / max(1, program.bytes_moved())


def kind_of(program: CompiledProgram, instruction: Instruction, inside: Computation) -> str:
    """Returns what a kernel does that does no arithmetic; empty for one that does."""
    body = {instruction.name: instruction}
    if instruction.opcode == "fusion":
        body = program.computations.get(instruction.called("calls"), {})
    elif instruction.opcode in ("copy", "transpose", "convert"):
        body = {**{name: inside[name] for name in instruction.operands if name in inside}, **body}
    else:
        return ""
    opcodes = {one.opcode for one in body.values()}
    if not opcodes <= MOVES:
        return ""
    if "transpose" in opcodes or _layout_changes(instruction, inside):
        return TRANSPOSE
    return CONVERT if "convert" in opcodes else COPY


def _layout_changes(instruction: Instruction, inside: Computation) -> bool:
    def order(shape: str) -> str:
        return shape.partition("{")[2].partition("}")[0].partition(":")[0]

    return any(
        name in inside and order(inside[name].shape) != order(instruction.shape) for name in instruction.operands
    )
