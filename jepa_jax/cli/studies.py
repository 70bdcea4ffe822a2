"""The two commands that train many times: `lr-search` over learning rates, `tradeoff` over numbers of epochs."""

import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from jepa_jax.base.console import Console
from jepa_jax.base.text import parse_numbers
from jepa_jax.cli.command import Command, Result
from jepa_jax.cli.flags import Arguments, Parser
from jepa_jax.cli.train import add_gpu_flag, use_gpu

TRAIN_COMMAND = (sys.executable, "-m", "jepa_jax", "train")
ABOUT_RUNS = """
Each run is a process of its own; the same command continues where it stopped. Writes results.json, results.md,
results.svg and study.html. Exit codes: 0 at least one run finished, 1 none did, 2 something to fix, 130 Ctrl-C,
143 SIGTERM (what was measured is kept).
"""
ABOUT_LR_SEARCH = f"""Trains briefly at several learning rates and compares linear probes on held-out train images.

  jepa-jax lr-search --config=quickstart --lrs=1e-3,2e-3,4e-3 --epochs=5 --output_dir=runs/lr [--seeds=0,1]
{ABOUT_RUNS}"""
ABOUT_TRADEOFF = f"""Compares held-out accuracy and time of several numbers of epochs, a whole schedule each.

  jepa-jax tradeoff --config=quickstart --epochs=5,10,15,25,40 --output_dir=runs/epochs [--seeds=0,1]
{ABOUT_RUNS}
Times that cannot be right (an epoch more than twice off the median, more epochs in less time) are flagged.
"""


def add_common_flags(parser: Parser) -> None:
    parser.add_config()
    parser.add_flag("output_dir", "DIR", "folder of the runs and results", required=True)
    parser.add_flag("seeds", "LIST", "seeds (train.seed), separated by commas; several show the noise", "0")
    parser.add_flag("timeout", "SECONDS", "stop a run after this time; its reason is listed", kind=float, least=0)
    add_gpu_flag(parser)
    parser.add_switch("resume", "continue in a folder with results; --noresume refuses one", default=True)


def add_lr_flags(parser: Parser) -> None:
    add_common_flags(parser)
    parser.add_flag("lrs", "LIST", "learning rates (optim.lr), separated by commas", required=True)
    parser.add_flag("epochs", "N", "epochs of each run (optim.epochs)", 5, least=1)


def add_tradeoff_flags(parser: Parser) -> None:
    add_common_flags(parser)
    parser.add_flag("epochs", "LIST", "numbers of epochs (optim.epochs), separated by commas", "5,10,15,25,40")


def search_rates(arguments: Arguments, console: Console) -> Result:
    lrs = parse_numbers("lrs", arguments.lrs)
    return conduct_study("lr_search", arguments, lrs, [arguments.epochs], fixed={"epochs": arguments.epochs})


def compare_epochs(arguments: Arguments, console: Console) -> Result:
    epochs = parse_numbers("epochs", arguments.epochs, int, smallest=1)
    return conduct_study("epoch_tradeoff", arguments, [None], epochs, fixed={})


def conduct_study(
    kind: str,
    arguments: Arguments,
    lrs: Sequence[float | None],
    epochs: Sequence[int],
    fixed: Mapping[str, Any],
) -> Result:
    """Trains every combination of rate, number of epochs and seed, and writes table, figure and page."""
    from jepa_jax.experiments.findings import find_in_rows
    from jepa_jax.experiments.study import Study, plan_runs, run_study, warmup_share
    from jepa_jax.reports.experiment_page import study_markdown, write_study

    use_gpu(arguments.gpu)
    overrides = tuple(arguments.override_flags)
    study = Study(
        kind=kind,
        config=arguments.config,
        output_dir=pathlib.Path(arguments.output_dir),
        command=TRAIN_COMMAND,
        overrides=overrides,
        fixed=fixed,
        warmup_share=warmup_share(arguments.config, overrides),
    )
    seeds = parse_numbers("seeds", arguments.seeds, int)
    code, rows = run_study(
        study,
        plan_runs(lrs, epochs, seeds),
        timeout=arguments.timeout,
        resume=arguments.resume,
        on_rows=lambda rows: write_study(study, rows, find_in_rows(kind, rows)),
    )
    found = find_in_rows(kind, rows)
    write_study(study, rows, found)
    facts = {**found.facts, "results": str(study.output_dir / "results.json"), "exit_code": code}
    return Result([facts], study_markdown(study, rows, found), code)


LR_SEARCH = Command("lr-search", ABOUT_LR_SEARCH, add_lr_flags, search_rates)
TRADEOFF = Command("tradeoff", ABOUT_TRADEOFF, add_tradeoff_flags, compare_epochs)
