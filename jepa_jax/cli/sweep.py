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

from jepa_jax.base.console import Console
from jepa_jax.base.errors import UserError
from jepa_jax.base.files import read_toml
from jepa_jax.cli.command import Command, Result
from jepa_jax.cli.flags import Parser, config_from, config_name

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
    parser.add_flag("output_json", "FILE", "file of the results", required=True)
    parser.add_flag("study", "FILE", "TOML file with values of these flags; the command line wins")
    for name, help in LISTS.items():
        parser.add_flag(name, "LIST", f"{help}, separated by commas; by default the config's own")
    parser.add_flag(
        "fixed_effective_batch", "N", "choose among combinations of this batch size only", kind=int, least=2
    )
    parser.add_flag("max_batches", "N", "measured batches of each repeat", 32, least=2)
    parser.add_flag("warmup_batches", "N", "batches before them, after those that the loader had ready", 4, least=1)
    parser.add_flag("repeats", "N", "times that each combination is measured", 3, least=1)
    parser.add_flag("time_limit", "SECONDS", "kill a trial after this time", 600.0, least=1)
    parser.add_flag("gpu_index", "N", "the only GPU to use", kind=int, least=0)
    parser.add_flag(
        "memory_fraction", "SHARE", "share of a GPU's memory that JAX takes, as in the training to come; by default "
        "that of XLA_CLIENT_MEM_FRACTION, or 0.75", kind=float, least=0.05, most=1,
    )  # fmt: skip
    parser.add_switch("use_dummy_data", "use random images instead of the config's data")
    parser.add_switch("resume", "continue with the results in --output_json")
    parser.add_switch("retry_failed", "as --resume, and measure again what failed or was skipped")


def expand_study(parser: Parser, argv: Sequence[str]) -> list[str]:
    """Replaces --study=FILE by the flags of that file, in front, so that those on the command line win."""
    finder = Parser(parser.prog, add_help=False)
    finder.add_flag("study", "FILE", "")
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


def measure_grid(arguments: argparse.Namespace, console: Console) -> Result:
    from jepa_jax.reports.sweep_page import write_sweep
    from jepa_jax.runtime.provenance import describe_hardware
    from jepa_jax.tuning.settings import grid_values
    from jepa_jax.tuning.sweep import Sweep, run_sweep, summarise
    from jepa_jax.tuning.trial_process import device_options

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
        **device_options(describe_hardware(arguments.gpu_index), arguments.memory_fraction),
    )
    code, document = run_sweep(
        sweep,
        time_limit=arguments.time_limit,
        resume=arguments.resume,
        retry_failed=arguments.retry_failed,
        fixed_batch=arguments.fixed_effective_batch,
    )
    table = write_sweep(document, sweep.output)
    text = "\n".join([table, *document["conclusion"]["text"]])
    return Result([summarise(sweep, document, code)], text, code)


SWEEP = Command("sweep", __doc__, add_flags, measure_grid, expand_study)
main = SWEEP.main
