"""Compares runs: `compare` on one HTML page, `compare-profiles` by where their time goes."""

import argparse

from jepa_jax.base.console import Console
from jepa_jax.base.errors import UserError
from jepa_jax.cli.command import Command, Result
from jepa_jax.cli.flags import Parser

RUNS = """Compares runs on one HTML page: accuracies, evaluations, curves and the config keys that differ.

jepa-jax compare runs/a runs/b [runs/c ...] [--output=comparison.html]
"""
PROFILES = """Compares the profiles of two runs, section by section, with confidence intervals.

jepa-jax compare-profiles runs/a runs/b
"""


def add_flags(parser: Parser) -> None:
    parser.add_argument("workdirs", nargs="*", metavar="DIR", help="folders of two or more runs")
    parser.add_flag("output", "FILE", "page to write; by default comparison.html beside the first run")


def compare_runs(arguments: argparse.Namespace, console: Console) -> Result:
    from jepa_jax.reports.comparison_page import comparison_text, write_comparison

    result = write_comparison(arguments.workdirs, arguments.output)
    differing = ", ".join(result["differing_keys"]) or "nothing"
    for text in result["warnings"]:
        console.warn(text)
    return Result([result], f"{comparison_text(result['runs'])}\n\ndiffer in: {differing}\npage: {result['output']}")


def add_profile_flags(parser: Parser) -> None:
    parser.add_argument("workdirs", nargs="*", metavar="DIR", help="folders of two runs, or their profile.json")


def run_compare_profiles(arguments: argparse.Namespace, console: Console) -> Result:
    from jepa_jax.profiling.profile_changes import changes_json, changes_table, compare_profiles, read_profile

    if len(arguments.workdirs) != 2:
        raise UserError(f"{len(arguments.workdirs)} arguments: give the folders of two runs, A and B")
    changes = compare_profiles(*(read_profile(path) for path in arguments.workdirs))
    return Result([changes_json(changes)], "\n".join(changes_table(changes)))


COMPARE = Command("compare", RUNS, add_flags, compare_runs)
COMPARE_PROFILES = Command("compare-profiles", PROFILES, add_profile_flags, run_compare_profiles, uses_jax=False)
