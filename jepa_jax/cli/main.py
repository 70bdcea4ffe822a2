"""The command `jepa-jax`: finds the sub-command and runs it."""

import importlib
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import NoReturn

from jepa_jax.base.console import print_result, tolerant_standard_error
from jepa_jax.base.errors import EXIT_OK, EXIT_USER_ERROR
from jepa_jax.base.signals import leave
from jepa_jax.cli.command import PROGRAM, Command
from jepa_jax.cli.flags import suggestion

# Module and attribute of each sub-command, in the order of --help.
COMMANDS = {
    "train": "train.TRAIN",
    "launch": "launch.LAUNCH",
    "evaluate": "evaluate.EVALUATE",
    "export": "weights.EXPORT",
    "embed": "weights.EMBED",
    "runs": "runs.RUNS",
    "report": "runs.REPORT",
    "show-summary": "runs.SHOW_SUMMARY",
    "compare": "runs.COMPARE",
    "compare-profiles": "runs.COMPARE_PROFILES",
    "checkpoint": "runs.VERIFY_CHECKPOINT",
    "configs": "configs.CONFIGS",
    "reference": "configs.REFERENCE",
    "describe": "configs.DESCRIBE",
    "prepare-data": "prepare_data.PREPARE_DATA",
    "plan": "plan.PLAN",
    "check-gpu": "check_gpu.CHECK_GPU",
    "tune": "throughput.TUNE",
    "sweep": "throughput.SWEEP",
    "lr-search": "studies.LR_SEARCH",
    "tradeoff": "studies.TRADEOFF",
}


def program(*words: str) -> NoReturn:
    """Runs a sub-command as the program that this process is: `words`, then the flags of the process."""
    leave(main([*words, *sys.argv[1:]]))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a sub-command; returns its exit code."""
    with tolerant_standard_error():
        return run(argv)


def run(argv: Sequence[str] | None) -> int:
    """Finds a sub-command and runs it; returns its exit code."""
    name, *rest = (sys.argv[1:] if argv is None else argv) or [""]
    if name in ("--help", "-h", "help"):
        print_result(help_text())
        return EXIT_OK
    if name == "--version":
        print_result(f"{PROGRAM} {metadata.version('jepa_jax')}")
        return EXIT_OK
    if name in COMMANDS:
        return find_command(name).main(rest)
    if not name or name.startswith("-"):
        print(f"error: no command; {PROGRAM} --help lists them", file=sys.stderr)
    else:
        print(f"error: {name}: no such command; {suggestion(name, COMMANDS, PROGRAM)}", file=sys.stderr)
    return EXIT_USER_ERROR


def find_command(name: str) -> Command:
    """Returns a sub-command; its module imports nothing that takes long."""
    module, attribute = COMMANDS[name].split(".")
    return getattr(importlib.import_module(f"jepa_jax.cli.{module}"), attribute)


def help_text() -> str:
    """Returns the list of sub-commands with their summaries."""
    commands = "\n".join(f"  {name:<18}{find_command(name).summary}" for name in COMMANDS)
    return f"""usage: {PROGRAM} COMMAND [flags]

Trains, evaluates, profiles, tunes and plans self-supervised vision models in JAX.

commands:
{commands}

{PROGRAM} COMMAND --help shows the flags of a command, {PROGRAM} --version the version."""
