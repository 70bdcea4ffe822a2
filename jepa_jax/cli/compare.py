"""Compares runs on one HTML page: accuracies, evaluations, curves and the config keys that differ.

jepa-jax compare runs/a runs/b [runs/c ...] [--output=comparison.html]
"""

import argparse

from jepa_jax.base.console import Console
from jepa_jax.cli.command import Command, Result
from jepa_jax.cli.flags import Parser


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


COMPARE = Command("compare", __doc__, add_flags, compare_runs)
main = COMPARE.main
