"""The frame of every sub-command: flags in, a result out, errors as one message and an exit code."""

import ast
import contextlib
import dataclasses
import json
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jepa_jax.base.classes import trust_files
from jepa_jax.base.console import Console, print_result
from jepa_jax.base.errors import EXIT_INTERRUPTED, EXIT_OK, UserError
from jepa_jax.base.signals import Interrupted, acknowledged, signals_exit
from jepa_jax.cli.flags import Arguments, Parser, suggestion
from jepa_jax.runtime.platforms import import_jax

PROGRAM = "jepa-jax"
CHATTY_LOGGERS = ("absl", "jax", "orbax")  # only their errors are shown


@dataclasses.dataclass(frozen=True)
class Result:
    """The outcome of a command.

    Attributes:
        data: JSON objects for programs, one per line of standard output, unless that is a terminal. Empty if the text
            itself is the result.
        text: the same for people; printed last on a terminal, otherwise on standard error.
        exit_code: one of `jepa_jax.base.errors`.
        next: commands that make sense now, printed below the text.
    """

    data: Sequence[dict[str, Any]]
    text: str
    exit_code: int = EXIT_OK
    next: Sequence[str] = ()


@dataclasses.dataclass(frozen=True)
class Command:
    """A sub-command.

    Attributes:
        name: as it is typed.
        documentation: what --help prints; the first line is the summary in the list of commands.
        add_flags: declares its flags.
        run: does the work.
        expand: changes the command line before it is parsed, e.g. replaces a flag by those of a file.
        uses_jax: whether jax is imported before it runs; without it a command answers at once.
        shows_start: whether a clock runs while modules are imported, until a bar replaces it.
        program: what is typed before the name.
    """

    name: str
    documentation: str
    add_flags: Callable[[Parser], None]
    run: Callable[[Arguments, Console], Result]
    expand: Callable[[Parser, Sequence[str]], Sequence[str]] = lambda parser, argv: argv
    uses_jax: bool = True
    shows_start: bool = False
    program: str = PROGRAM

    @property
    def summary(self) -> str:
        return self.documentation.partition("\n")[0]

    def main(self, argv: Sequence[str] | None = None) -> int:
        """Parses flags and runs the command; returns the exit code.

        A user's mistake prints one error message and returns its exit code instead of raising.
        """
        for name in CHATTY_LOGGERS:
            logging.getLogger(name).setLevel(logging.ERROR)
        console = Console()
        try:
            with signals_exit():
                arguments = self.parse(sys.argv[1:] if argv is None else argv)
                if self.shows_start:
                    console.start("starting", None)
                if self.uses_jax:
                    import_jax()
                    set_jax_flags(arguments.jax_flags)
            trusting = trust_files() if getattr(arguments, "trust", False) else contextlib.nullcontext()
            with trusting, acknowledged(console.line):
                result = self.run(arguments, console)
            show(result, console, as_json=arguments.json is True)
            return result.exit_code
        except Interrupted as stop:
            return stop.exit_code
        except UserError as error:
            console.stop()
            console.error(str(error))
            return error.exit_code
        except KeyboardInterrupt:
            return EXIT_INTERRUPTED
        finally:
            console.stop()

    def parse(self, argv: Sequence[str]) -> Arguments:
        """Returns the flags of the command; --help prints them and exits with code 0."""
        parser = Parser(f"{self.program} {self.name}", self.documentation)
        self.add_flags(parser)
        if not parser.has_flag("json"):
            parser.add_switch("json", "print the result as JSON also on a terminal")
        return parser.parse(self.expand(parser, argv))


def set_jax_flags(values: Mapping[str, str]) -> None:
    """Sets options of jax that were given as `--jax_NAME=VALUE`."""
    if not values:
        return
    import jax

    for name, text in values.items():
        known = jax.config.values
        if name not in known:
            raise UserError(f"--{name}: jax has no such option; {suggestion(name, known, PROGRAM)}")
        is_text = known[name] is None or isinstance(known[name], str)
        jax.config.update(name, text if is_text else ast.literal_eval(text.capitalize()))


def show(result: Result, console: Console, *, as_json: bool) -> None:
    """Prints a result: text on a terminal, JSON for a pipe, a file or --json."""
    if not result.data and not result.text:
        return
    if result.next:
        lines = [result.text.rstrip("\n"), "", "next:", *(f"  {PROGRAM} {command}" for command in result.next)]
        result = dataclasses.replace(result, text="\n".join(lines))
    on_terminal = sys.stdout is not None and sys.stdout.isatty()
    if not result.data or (on_terminal and not as_json):
        print_result(result.text.removesuffix("\n"))
        return
    console.stop()
    console.line(result.text)
    for line in result.data:
        print_result(json.dumps(line))
