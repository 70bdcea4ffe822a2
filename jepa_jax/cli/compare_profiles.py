"""Compares the profiles of two runs, section by section, with confidence intervals.

jepa-jax compare-profiles runs/a runs/b
"""

import argparse

from jepa_jax.base.console import Console
from jepa_jax.base.errors import UserError
from jepa_jax.cli.command import Command, Result
from jepa_jax.cli.flags import Parser


def add_flags(parser: Parser) -> None:
    parser.add_argument("workdirs", nargs="*", metavar="DIR", help="folders of two runs, or their profile.json")


def run_compare_profiles(arguments: argparse.Namespace, console: Console) -> Result:
    from jepa_jax.profiling.profile_changes import changes_json, changes_table, compare_profiles, read_profile

    if len(arguments.workdirs) != 2:
        raise UserError(f"{len(arguments.workdirs)} arguments: give the folders of two runs, A and B")
    changes = compare_profiles(*(read_profile(path) for path in arguments.workdirs))
    return Result([changes_json(changes)], "\n".join(changes_table(changes)))


COMPARE_PROFILES = Command("compare-profiles", __doc__, add_flags, run_compare_profiles, uses_jax=False)
main = COMPARE_PROFILES.main
