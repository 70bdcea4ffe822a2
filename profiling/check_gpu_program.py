"""Lists what a step compiled for a GPU moves without computing: layout changes, copies, and changes of precision.

  python profiling/check_gpu_program.py --config=rapid [--gpu=rtx4090] [--rows=15] [--config.KEY=VALUE ...]

No GPU is needed (docs/guides/plan.md). A kernel counts as waste if nothing in it does arithmetic:
  transpose  it changes the order of axes
  convert    it changes the precision of numbers and nothing else
  copy       it moves numbers as they are
A float32 array of activations in a step that computes in bfloat16 is listed too ("float32"): it is twice as large as it
need be. Kernels of the optimizer and of the slow copy are left out there: parameters are float32. Rows are by line of
code, the most bytes first; what slices, pads and joins on the way to a product is no waste and not listed.

Last line: JSON with `bytes_moved`, `waste_bytes` (transpose, convert and copy), `float32_bytes`, `waste_percent` and
`rows`.
"""

import collections
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from jepa_jax.base.console import Console
from jepa_jax.cli.command import Command, Result
from jepa_jax.cli.flags import Arguments, Parser, planned_config_from
from jepa_jax.runtime import platforms

if TYPE_CHECKING:
    from jepa_jax.compiled.hlo import Instruction
    from jepa_jax.config.groups import Config


FLOAT32 = "float32"
OF_PARAMETERS = ("optimizer", "ema")


class Found(NamedTuple):
    """Kernels of one line of code that only move numbers."""

    kind: str
    line: str
    scope: str


def add_flags(parser: Parser) -> None:
    parser.add_config()
    parser.add_flag("gpu", "NAME", "GPU to compile for, as in `jepa-jax plan`", "rtx4090")
    parser.add_flag("rows", "N", "lines to print", 15, least=1)


def find(text: str) -> tuple[dict[Found, list[int]], int]:
    """Returns kernels and bytes of each finding, and the bytes that the whole program moves."""
    from jepa_jax.compiled.buffers import source_lines
    from jepa_jax.compiled.hlo import parse_hlo
    from jepa_jax.compiled.moves import SMALLEST, kind_of

    program, lines = parse_hlo(text), source_lines(text)
    found: dict[Found, list[int]] = collections.defaultdict(lambda: [0, 0])
    for one, inside, times in program.runs():
        moved = program.kernel_bytes(one, inside)
        kind = kind_of(program, one, inside) if moved >= SMALLEST else ""
        if moved >= SMALLEST and not kind and writes_wide_activations(one):
            kind, moved = FLOAT32, float32_bytes(one)
        if kind:
            frame = int(one.search(r"stack_frame_id=(\d+)") or 0)
            known = found[Found(kind, lines.get(frame, "?"), "/".join(one.scope.split("/")[1:3]))]
            known[0] += times
            known[1] += times * moved
    return found, program.bytes_moved()


def writes_wide_activations(instruction: "Instruction") -> bool:
    """Returns whether a kernel that computes writes arrays in float32 that are no parameters."""
    from jepa_jax.compiled.moves import SMALLEST

    of_parameters = any(f"/{part}/" in instruction.scope for part in OF_PARAMETERS)
    return instruction.opcode == "fusion" and float32_bytes(instruction) >= SMALLEST and not of_parameters


def float32_bytes(instruction: "Instruction") -> int:
    """Returns the bytes of float32 arrays that a kernel writes."""
    from jepa_jax.compiled.hlo import ARRAY, shape_bytes

    return sum(shape_bytes(array[0]) for array in ARRAY.finditer(instruction.shape) if array[1] == "f32")


def compiled_text(config: "Config", gpu: str) -> str:
    """Returns the step of a config as compiled for a GPU that need not be there."""
    from jepa_jax.data.contract import abstract_batch
    from jepa_jax.data.facts import data_facts
    from jepa_jax.data.photos.crops import batch_spec
    from jepa_jax.planning.absent_gpus import absent_devices, compile_lowered
    from jepa_jax.planning.step_compiler import program_for, trace_step
    from jepa_jax.runtime.hardware import load_table

    facts = data_facts(config.data, assume=True)
    devices = absent_devices(load_table()[gpu], "1x1x1")
    program = program_for(config, facts, devices)
    batch = abstract_batch(batch_spec(config, facts.spec), config.data.batch_size)
    return compile_lowered(trace_step(program, batch).lower()).as_text()


def check(arguments: Arguments, console: Console) -> Result:
    platforms.prepare_to_plan()
    config = planned_config_from(arguments)
    console.line(f"compiling {config.data.batch_size} images per step for {arguments.gpu}")
    found, moved = find(compiled_text(config, arguments.gpu))
    ordered = sorted(found.items(), key=lambda item: -item[1][1])
    waste = sum(size for one, (_, size) in ordered if one.kind != FLOAT32)
    wide = sum(size for one, (_, size) in ordered if one.kind == FLOAT32)
    rows: list[dict[str, Any]] = [
        {"kind": one.kind, "line": one.line, "scope": one.scope, "kernels": kernels, "bytes": size}
        for one, (kernels, size) in ordered
    ]
    lines = [f"{'kind':<10} {'MiB':>8} {'kernels':>8}  line, scope"]
    lines += [
        f"{row['kind']:<10} {row['bytes'] / 2**20:>8.1f} {row['kernels']:>8}  {row['line']}, {row['scope']}"
        for row in rows[: arguments.rows]
    ]
    lines.append(
        f"{waste / 2**30:.2f} of {moved / 2**30:.2f} GiB moved are layout changes, copies and conversions "
        f"({100 * waste / moved:.1f} %); {wide / 2**30:.2f} GiB of float32 activations are written"
    )
    result = {
        "config": arguments.config, "gpu": arguments.gpu, "batch_size": config.data.batch_size, "bytes_moved": moved,
        "waste_bytes": waste, "float32_bytes": wide, "waste_percent": 100 * waste / moved, "rows": rows,
    }  # fmt: skip
    return Result([result], "\n".join(lines))


if __name__ == "__main__":
    sys.exit(Command("profiling/check_gpu_program.py", __doc__, add_flags, check, program="python").main())
