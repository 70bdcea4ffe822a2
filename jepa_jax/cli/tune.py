"""Finds the fastest settings for this machine within a budget of time, and writes them for training.

  jepa-jax tune --config=quickstart --budget=10m [--output_dir=runs/tune] [--config.key=value ...]
  jepa-jax train --config=quickstart --workdir=runs/a --tuned=runs/tune/tuned.json

Each trial is a process: one that runs out of memory, crashes or hangs is listed with its reason. Writes tuned.json,
tune.json and tune.html. Exit codes: 0 found, 1 nothing could be measured, 2 something to fix, 130 Ctrl-C, 143 SIGTERM
(what was measured is kept, --resume continues).
"""

import pathlib

from jepa_jax.base.console import Console
from jepa_jax.cli.command import Command, Result
from jepa_jax.cli.flags import Arguments, Parser, config_from, config_name, fields_from
from jepa_jax.cli.sweep import add_lists, join_lists, lists_from


def add_flags(parser: Parser) -> None:
    parser.add_config()
    parser.add_flag("budget", "TIME", "time for the whole search: 90s, 10m, 1.5h", "10m")
    parser.add_flag("output_dir", "DIR", "folder of the results", "runs/tune")
    parser.add_flag(
        "fixed_effective_batch", "N", "keep this number of images per update; config: the config's own", default=""
    )
    parser.add_flag("margin", "SHARE", "share of the memory that stays free", 0.08, least=0, most=0.9)
    parser.add_flag(
        "memory_limit_gb", "GIB", "memory of a run; by default the GPU's pool, or 80 % of the free memory",
        kind=float, least=0,
    )  # fmt: skip
    parser.add_flag(
        "memory_fraction", "SHARE", "share of a GPU's memory that JAX takes in trials and, by tuned.json, in training; "
        "by default that of XLA_CLIENT_MEM_FRACTION, or 0.75", kind=float, least=0.05, most=1,
    )  # fmt: skip
    parser.add_flag("gpu_index", "N", "the only GPU to use", kind=int, least=0)
    add_lists(parser, default="what is worth a try on this machine")
    parser.add_switch("use_dummy_data", "use random images instead of the config's data")
    parser.add_switch("resume", "continue a search that was interrupted")


def run_tune(arguments: Arguments, console: Console) -> Result:
    from jepa_jax.experiments.tune import TuneOptions, tune
    from jepa_jax.reports.experiment_page import sweep_page
    from jepa_jax.reports.page import write_page

    others = {
        "output_dir": pathlib.Path(arguments.output_dir).expanduser(),
        "values": lists_from(arguments),
        "config_name": config_name(arguments),
    }
    options = TuneOptions(**fields_from(arguments, TuneOptions) | others)
    code, result, document = tune(config_from(arguments), options, console)
    write_page(result["html"], sweep_page(document))
    lines = list(document["conclusion"]["text"])
    if result["tuned"]:
        same = " ".join([f"--config={arguments.config}", *arguments.override_flags])
        lines.append(f"Train with: jepa-jax train {same} --workdir=DIR --tuned={result['tuned']}")
    return Result([result], "\n".join(lines), code)


TUNE = Command("tune", __doc__, add_flags, run_tune, lambda parser, argv: join_lists(argv))
