"""The two commands about configs: `configs` lists the shipped ones, `reference` explains every key."""

import argparse

from jepa_jax.base.console import Console
from jepa_jax.cli.command import Command, Result
from jepa_jax.cli.flags import Parser
from jepa_jax.config.recipe import shipped_recipes, summary_of

ABOUT_CONFIGS = """Lists the configs that come with the package, with the first line of their documentation.

  jepa-jax configs
"""
ABOUT_REFERENCE = """Prints a Markdown page with every config key: default, meaning and limits.

  jepa-jax reference > docs/reference/config.md
"""


def add_no_flags(parser: Parser) -> None:
    """Leaves the parser as it is."""


def list_configs(arguments: argparse.Namespace, console: Console) -> Result:
    summaries = {name: summary_of(path) for name, path in shipped_recipes().items()}
    width = max(map(len, summaries))
    lines = [f"{name:<{width}}  {summary}" for name, summary in summaries.items()]
    return Result([{"configs": summaries}], "\n".join(lines))


def print_reference(arguments: argparse.Namespace, console: Console) -> Result:
    from jepa_jax.reports.config_reference import config_reference

    return Result([], config_reference())


CONFIGS = Command("configs", ABOUT_CONFIGS, add_no_flags, list_configs, uses_jax=False)
REFERENCE = Command("reference", ABOUT_REFERENCE, add_no_flags, print_reference)
