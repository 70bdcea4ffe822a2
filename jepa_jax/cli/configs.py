"""Lists the configs that come with the package, with the first line of their documentation.

jepa-jax configs
"""

import argparse
import ast
import pathlib

from jepa_jax.base.console import Console
from jepa_jax.cli.command import Command, Result
from jepa_jax.cli.flags import Parser

FOLDER = pathlib.Path(__file__).parents[1] / "configs"  # in a clone a link to the configs/ beside the package


def add_flags(parser: Parser) -> None:
    """Adds nothing: the command has no flags of its own."""


def list_configs(arguments: argparse.Namespace, console: Console) -> Result:
    summaries = {name: first_line(path) for name, path in shipped_configs().items()}
    width = max(map(len, summaries))
    lines = [f"{name:<{width}}  {summary}" for name, summary in summaries.items()]
    return Result([{"configs": summaries}], "\n".join(lines))


def shipped_configs() -> dict[str, pathlib.Path]:
    """Returns the files of the shipped configs by name."""
    return {path.stem: path for path in sorted(FOLDER.glob("[!_]*.py"))}


def first_line(path: pathlib.Path) -> str:
    """Returns the first line of a config's documentation without executing the file."""
    return (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]


CONFIGS = Command("configs", __doc__, add_flags, list_configs)
main = CONFIGS.main
