"""Reads the kernels of a compiled program: what each one multiplies, computes and moves.

A kernel is an instruction that a GPU runs by itself: a convolution of cuDNN, a matrix product of cuBLAS, a kernel of
Triton, or a fusion. Equal kernels are kept once, with their number.
"""

import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from jepa_jax.compiled.hlo import ARRAY, FREE, CompiledProgram, Computation, Instruction

CONVOLUTION, MATMUL, ATTENTION, ELEMENTWISE = "convolution", "matmul", "attention", "elementwise"
KINDS = (CONVOLUTION, MATMUL, ATTENTION, ELEMENTWISE)
EXCHANGES = re.compile(r"all-reduce|all-gather|reduce-scatter|all-to-all|collective|-done$|^(send|recv)")
REMATERIALIZED = re.compile(r"\.remat\d*")  # how XLA names what it computes again to save memory
SLOW = frozenset((  # functions of the special units or of several instructions, and what each is taken to cost
    "exponential", "exponential-minus-one", "log", "log-plus-one", "tanh", "logistic", "power", "sqrt", "rsqrt", "cbrt",
    "sine", "cosine", "tan", "atan2", "erf", "divide", "remainder",
))  # fmt: skip
SLOW_COST = 8
COPIES = frozenset((
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "broadcast", "iota", "reshape", "transpose",
    "slice", "concatenate", "pad", "reverse", "copy", "dynamic-slice", "dynamic-update-slice", "gather",
    "bitcast-convert", "convert",
))  # fmt: skip
FORWARD_PRODUCTS, BACKWARD_PRODUCTS = 2, 5  # of attention: scores and mixing; dV, dP, dQ, dK and scores again
_ATTENTION = re.compile(r"attention_(forward|backward)_(\d+)")  # names of the kernels, with tokens per block


class Kernel(NamedTuple):
    """Kernels that are equal; figures are of one of them."""

    kind: str
    dtype: str  # of the products: "bf16", "f32", ...; empty without products
    flops: int  # of matrix products and convolutions
    operations: int  # other arithmetic, in units of one addition
    bytes: int
    scope: str  # where the first one was written
    runs: int = 1  # how many there are
    recomputed: int = 0  # how many of them XLA runs again instead of keeping their results


def read_kernels(program: CompiledProgram) -> list[Kernel]:
    """Returns the kernels that one call of a program runs; exchanges between devices are not among them."""
    found: dict[tuple[Any, ...], Kernel] = {}
    for instruction, computation, times in program.runs():
        moved = program.kernel_bytes(instruction, computation)
        if instruction.opcode in FREE or EXCHANGES.search(instruction.opcode) or not moved:
            continue
        kernel = _kernel(program, instruction, computation, moved)
        again = times if REMATERIALIZED.search(instruction.name) else 0
        known = found.get(kernel[:5], kernel._replace(runs=0))
        found[kernel[:5]] = known._replace(runs=known.runs + times, recomputed=known.recomputed + again)
    return list(found.values())


def kernels_by_name(program: CompiledProgram) -> dict[str, Kernel]:
    """Returns what every instruction of a program that moves data does in one run, by its name."""
    found = {}
    for computation in program.computations.values():
        for instruction in computation.values():
            if moved := program.kernel_bytes(instruction, computation):
                found[instruction.name] = _kernel(program, instruction, computation, moved)
    return found


def _kernel(program: CompiledProgram, instruction: Instruction, inside: Computation, moved: int) -> Kernel:
    attention = attention_flops(instruction, inside)
    if attention:
        return Kernel(ATTENTION, _operand_type(instruction, inside), attention, 0, moved, instruction.scope)
    fused = program.computations.get(instruction.called("calls"), {}) if instruction.opcode == "fusion" else {}
    body, computation = (fused, fused) if fused else ({instruction.name: instruction}, inside)
    products = [one for one in body.values() if one.product_kind]
    flops = sum(product_flops(one, computation) for one in products)
    kind = products[0].product_kind if products else ELEMENTWISE
    dtype = _operand_type(products[0], computation) if products else ""
    operations = sum(_operations(one, computation) for one in body.values() if not one.product_kind)
    return Kernel(kind, dtype, flops, operations, moved, instruction.scope)


def attention_flops(instruction: Instruction, inside: Computation) -> int:
    """Returns the operations of a fused attention kernel, those beyond the last token included; 0 for others."""
    name = instruction.scope.rpartition("/pallas_call")[0].rpartition("/")[2]  # of the kernel
    match = _ATTENTION.fullmatch(name)
    if instruction.opcode != "custom-call" or not match:
        return 0
    batch, length, joined, width = _extents(inside[instruction.operands[0]].shape)  # of queries, keys and values
    products, block = BACKWARD_PRODUCTS if match[1] == "backward" else FORWARD_PRODUCTS, int(match[2])
    return products * 2 * batch * (joined // 3) * (-(-length // block) * block) ** 2 * width


def product_flops(instruction: Instruction, inside: Computation) -> int:
    """Returns the operations of a convolution or matrix product, those with padding included."""
    shapes = [_extents(inside[name].shape) for name in instruction.operands[:2] if name in inside]
    if len(shapes) < 2:  # a part of a program
        return 0
    result = _extents(instruction.shape)
    if instruction.product_kind == MATMUL:
        contracted = instruction.search(r"lhs_contracting_dims=\{([\d,]*)\}")
        contracted = contracted or instruction.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]')
        axes = [int(axis) for axis in re.findall(r"\d+", contracted)]
        return 2 * math.prod(result) * math.prod(shapes[0][axis] for axis in axes)
    taps = math.prod(int(size) for size in (instruction.search(r"window=\{size=([\dx]+)") or "1").split("x"))
    labels = instruction.search(r"dim_labels=\w+_(\w+)->")
    kernel, outputs = shapes[1], result  # of the forward convolution that this one belongs to
    if "BackwardInput" in instruction.target:
        outputs = shapes[0]
    elif "BackwardFilter" in instruction.target:
        kernel, outputs = result, shapes[1]
    return 2 * math.prod(outputs) * taps * kernel[labels.index("i")]


def _operations(instruction: Instruction, inside: Computation) -> int:
    """Returns the additions that an instruction without products is worth; copies cost their bytes alone."""
    if instruction.opcode in COPIES or instruction.opcode in FREE:
        return 0
    size = math.prod(_extents(instruction.shape))
    if instruction.opcode.startswith(("reduce", "select-and-scatter")):
        inputs = [inside[name].shape for name in instruction.operands[:1] if name in inside]
        size = max([size, *(math.prod(_extents(shape)) for shape in inputs)])
    return size * (SLOW_COST if instruction.opcode in SLOW else 1)


def _operand_type(instruction: Instruction, inside: Computation) -> str:
    first = inside.get(instruction.operands[0], instruction)
    return ARRAY.findall(first.shape)[0][0]


def _extents(shape: str) -> Sequence[int]:
    """Returns the extents of the first array of a shape."""
    _, extents = ARRAY.findall(shape)[0]
    return [int(extent.lstrip("<=")) for extent in extents.split(",") if extent]
