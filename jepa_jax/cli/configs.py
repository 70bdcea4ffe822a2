"""Lists the configs that come with the package, with the first line of their documentation.

jepa-jax configs
"""

import argparse

from jepa_jax.base.console import Console
from jepa_jax.cli.command import Command, Result
from jepa_jax.cli.flags import Parser
from jepa_jax.config.recipe import shipped_recipes, summary_of


def add_flags(parser: Parser) -> None:
    """Adds nothing: the command has no flags of its own."""


def list_configs(arguments: argparse.Namespace, console: Console) -> Result:
    summaries = {name: summary_of(path) for name, path in shipped_recipes().items()}
    width = max(map(len, summaries))
    lines = [f"{name:<{width}}  {summary}" for name, summary in summaries.items()]
    return Result([{"configs": summaries}], "\n".join(lines))


CONFIGS = Command("configs", __doc__, add_flags, list_configs)
main = CONFIGS.main
