"""Measures the training speed of every combination of settings on this machine.

  jepa-jax sweep --config=quickstart --batch_sizes=64,128,256 --num_workers=0,1 --output_json=runs/sweep.json
  jepa-jax sweep --study=profiling/sweeps/a6000.toml --gpu_index=0 --output_json=runs/a6000.json

Each repeat is a process of its own: one that runs out of memory, crashes or hangs is listed with its reason. Results
are on disk after each repeat; after Ctrl-C or kill -9 the same command with --resume continues. A page (.html) and a
table (.md) are written beside the JSON file. Exit codes: 0 at least one combination was measured, 1 none was,
2 something to fix, 130 Ctrl-C, 143 SIGTERM (what was measured is kept).
"""

import argparse
import pathlib
from collections.abc import Sequence
from typing import Any

from jepa_jax.base.console import Console
from jepa_jax.base.errors import UserError
from jepa_jax.base.files import read_toml
from jepa_jax.cli.command import Command, Result
from jepa_jax.cli.flags import Parser, config_from, config_name, number

LISTS = {
    "batch_sizes": "images per optimizer step",
    "num_workers": "processes that load batches",
    "grad_accum": "parts that a batch is computed in",
    "precisions": "bfloat16, float32 or both",
    "remats": "none, full or both",
    "pipelines": "grain, device or both",
}



def add_flags(parser: Parser) -> None:
    parser.add_config()
    parser.add_argument("--output_json", required=True, metavar="FILE", help="file of the results")
    parser.add_argument("--study", metavar="FILE", help="TOML file with values of these flags; the command line wins")
    for name, help in LISTS.items():
        parser.add_argument(f"--{name}", metavar="LIST", help=f"{help}, separated by commas (default: the config's)")
    parser.add_argument(
        "--fixed_effective_batch",
        type=number(int, least=2),
        metavar="N",
        help="choose among combinations of this batch size only",
    )
    parser.add_argument(
        "--max_batches",
        type=number(int, least=2),
        default=32,
        metavar="N",
        help="measured batches of each repeat (default: 32)",
    )
    parser.add_argument(
        "--warmup_batches",
        type=number(int, least=1),
        default=4,
        metavar="N",
        help="batches before them, after those that the loader had ready (default: 4)",
    )
    parser.add_argument(
        "--repeats",
        type=number(int, least=1),
        default=3,
        metavar="N",
        help="times that each combination is measured (default: 3)",
    )
    parser.add_argument(
        "--time_limit",
        type=number(float, least=1),
        default=600.0,
        metavar="SECONDS",
        help="kill a trial after this time (default: 600)",
    )
    parser.add_argument("--gpu_index", type=number(int, least=0), metavar="N", help="the only GPU to use")
    parser.add_switch("use_dummy_data", "use random images instead of the config's data")
    parser.add_switch("resume", "continue with the results in --output_json")
    parser.add_switch("retry_failed", "as --resume, and measure again what failed or was skipped")


def expand_study(parser: Parser, argv: Sequence[str]) -> list[str]:
    """Replaces --study=FILE by the flags of that file, in front, so that those on the command line win."""
    finder = Parser(parser.prog, "")
    finder.add_argument("--study")
    found, rest = finder.parse_known_args(argv)
    return [*study_flags(parser, found.study), *rest] if found.study else rest


def study_flags(parser: Parser, path: str) -> list[str]:
    """Returns the entries of a study file as flags."""
    entries = read_toml(pathlib.Path(path), f"--study={path}", "see profiling/sweeps/")
    for key in entries:
        if not (parser.has_flag(f"--{key}") or key.startswith("config.")):
            raise UserError(f"--study={path}: {key} is neither a flag of {parser.prog} nor config.group.key")
    return [f"--{key}={','.join(map(str, value)) if isinstance(value, list) else value}"
            for key, value in entries.items()]  # fmt: skip


def run_sweep(arguments: argparse.Namespace, console: Console) -> Result:
    from jepa_jax.tuning.sweep import conduct
    from jepa_jax.tuning.sweep_settings import Sweep, grid_values

    config = config_from(arguments)
    sweep = Sweep(
        config=config,
        config_name=config_name(arguments),
        values=grid_values(config, {name: getattr(arguments, name) for name in LISTS}),
        output=pathlib.Path(arguments.output_json),
        max_batches=arguments.max_batches,
        warmup_batches=arguments.warmup_batches,
        repeats=arguments.repeats,
        use_dummy_data=arguments.use_dummy_data,
        gpu_index=arguments.gpu_index,
    )
    code, result, text = conduct(
        sweep,
        time_limit=arguments.time_limit,
        resume=arguments.resume,
        retry_failed=arguments.retry_failed,
        fixed_effective_batch=arguments.fixed_effective_batch,
    )
    return Result([result], text, code)


SWEEP = Command("sweep", __doc__, add_flags, run_sweep, expand_study)
main = SWEEP.main
