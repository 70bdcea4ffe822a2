"""Checks what only the GPU at hand can tell: numerics, compiled programs, profiler, memory, speed, restarts.

  jepa-jax check-gpu [--minutes=5] [--output=card.json] [--parts=numerics,program]

Each part runs in a process of its own; the table grows as they end. Without a GPU the parts run that make sense on a
CPU. The file is what `python profiling/fit_speed.py card.json ...` reads to make predictions better for this card
(docs/guides/check_gpu.md).

Exit code 0 if all hold, 1 if a part failed, 2 if a flag is wrong.
"""

from jepa_jax.base.console import Console
from jepa_jax.base.errors import EXIT_OK, UserError
from jepa_jax.base.files import write_json
from jepa_jax.cli.command import Command, Result
from jepa_jax.cli.flags import Arguments, Parser

EXIT_FAILED = 1


def add_flags(parser: Parser) -> None:
    parser.add_flag("minutes", "M", "time to spend; from 15 on a GPU tries every width with every length", 5.0)
    parser.add_flag("output", "FILE", "where to write what was found, as JSON")
    parser.add_flag("parts", "NAMES", "parts to run, separated by commas; empty = all", "")


def run_check(arguments: Arguments, console: Console) -> Result:
    from jepa_jax.device_check.check import LEFT_OUT, PARTS, check_device
    from jepa_jax.runtime.gpus import count_gpus

    names = arguments.parts.split(",") if arguments.parts else list(PARTS)
    if unknown := [name for name in names if name not in PARTS]:
        raise UserError(f"--parts={arguments.parts}: {unknown[0]} is none of {', '.join(PARTS)}")
    if arguments.minutes <= 0:
        raise UserError(f"--minutes={arguments.minutes:g}: must be above 0")
    card = check_device(names, arguments.minutes, count_gpus(), console.line)
    if arguments.output:
        write_json(arguments.output, card)
    left_out = [name for name, part in card["parts"].items() if part["status"] == LEFT_OUT]
    missing = f"; left out without a GPU, or with only one: {', '.join(left_out)}" if left_out else ""
    text = f"{'all parts that ran hold' if card['passed'] else 'a part failed'}{missing}"
    shown = {name: card[name] for name in ("passed", "gpu", "rates")}
    status = {name: part["status"] for name, part in card["parts"].items()}
    return Result([shown | {"parts": status}], text, EXIT_OK if card["passed"] else EXIT_FAILED)


CHECK_GPU = Command("check-gpu", __doc__, add_flags, run_check, uses_jax=False)
