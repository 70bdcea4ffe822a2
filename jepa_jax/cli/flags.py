"""Command lines: flags, suggestions for mistyped ones, and `--config.group.key=value` overrides."""

import argparse
import difflib
import pathlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, NoReturn

from jepa_jax.base.errors import UserError

if TYPE_CHECKING:
    from jepa_jax.config.groups import Config

OVERRIDE = "--config."


class Parser(argparse.ArgumentParser):
    """Parses the flags of one command; raises UserError with a suggestion where argparse would exit."""

    def __init__(self, prog: str, description: str = "", *, add_help: bool = True):
        super().__init__(
            prog=prog,
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
            add_help=add_help,
        )

    def add_config(self, default: str | None = None) -> None:
        """Adds --config, which must be given if it has no default; `parse` then also takes --config.group.key=value."""
        self.add_flag(
            "config",
            "NAME",
            "name of a shipped config (jepa-jax configs lists them), FILE.py or FILE.py:ARGUMENT; "
            "--config.group.key=VALUE changes a key",
            default,
            required=default is None,
        )
        self.set_defaults(overrides={})

    def add_flag(
        self,
        name: str,
        metavar: str,
        help: str,
        default: Any = None,
        *,
        kind: Callable[[str], Any] | None = None,
        least: float | None = None,
        most: float | None = None,
        required: bool = False,
    ) -> None:
        """Adds --name=VALUE of type `kind` (default: that of `default`), within limits; --help shows the default."""
        kind = kind or (str if default is None else type(default))
        shown = f"{help} (default: {default})" if default not in (None, "") else help
        self.add_argument(
            f"--{name}", metavar=metavar, help=shown.replace("%", "%%"), default=default, required=required,
            type=lambda text: within_limits(text, kind, least, most),
        )  # fmt: skip

    def add_switch(self, name: str, help: str, default: bool = False) -> None:
        """Adds a flag that is on or off: --name, --noname, --no-name or --name=true."""
        shown = f"{help} (default: true; --no{name} switches it off)" if default else help
        self.add_argument(f"--{name}", action="store_const", const=True, default=default, help=shown)
        off = (f"--no{name}", f"--no-{name}")
        self.add_argument(*off, dest=name, action="store_const", const=False, help=argparse.SUPPRESS)

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """Returns the flags of `argv`; overrides of config keys are in `overrides`, as text.

        Raises:
            UserError: an unknown, missing or invalid flag, or a word that belongs to none.
        """
        overrides: dict[str, str] = {}
        if "overrides" in self._defaults:
            argv, overrides = split_overrides(argv)
        for argument in argv:
            flag = argument.partition("=")[0]
            if flag.startswith("--") and not self.has_flag(flag):
                raise UserError(f"{flag}: no such flag; {suggestion(flag, self._option_string_actions, self.prog)}")
        arguments, rest = self.parse_known_intermixed_args([self._plain_switch(argument) for argument in argv])
        if rest:
            raise UserError(f"unexpected argument {rest[0]!r}; flags are written --name=value")
        if overrides:
            arguments.overrides = overrides
        return arguments

    def _plain_switch(self, argument: str) -> str:
        """Returns --name or --noname for a switch that is written --name=true or --name=false."""
        flag, equals, value = argument.partition("=")
        action = self._option_string_actions.get(flag)
        if not equals or action is None or action.nargs != 0:
            return argument
        try:
            return flag if boolean(value) else f"--no{flag[2:]}"
        except argparse.ArgumentTypeError as error:
            raise UserError(f"{flag}: {error}") from None

    def has_flag(self, flag: str) -> bool:
        return flag in self._option_string_actions

    def error(self, message: str) -> NoReturn:
        message = message.removeprefix("argument ").replace("the following arguments are required:", "missing:")
        raise UserError(f"{message}; see {self.prog} --help")


def split_overrides(argv: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Splits a command line into flags of the command and config overrides, `{"optim.lr": "0.1"}`."""
    own: list[str] = []
    overrides: dict[str, str] = {}
    rest = iter(argv)
    for argument in rest:
        if not argument.startswith(OVERRIDE):
            own.append(argument)
            continue
        key, equals, value = argument.removeprefix(OVERRIDE).partition("=")
        if not equals:
            value = next(rest, "--")
            if value.startswith("--"):
                raise UserError(f"{argument}: no value; write {argument}=VALUE")
        overrides[key] = value
    return own, overrides


def suggestion(word: str, known: Iterable[str], program: str) -> str:
    """Returns what to say about a mistyped word: the nearest known one, or where all of them are listed."""
    names = {name.lower().replace("-", "_"): name for name in known}
    close = difflib.get_close_matches(word.lower().replace("-", "_"), names, n=1)
    return f"did you mean {names[close[0]]}?" if close else f"{program} --help lists them"


def boolean(text: str) -> bool:
    """Returns the value of a switch written as --name=true or --name=false."""
    values = {"true": True, "1": True, "false": False, "0": False}
    if text.lower() not in values:
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return values[text.lower()]


def within_limits(text: str, kind: Callable[[str], Any], least: float | None, most: float | None) -> Any:
    """Returns the value of a flag, or raises what argparse turns into an error message."""
    try:
        value = kind(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of type {kind.__name__}") from None
    if (least is not None and not value >= least) or (most is not None and not value <= most):
        limits = {"at least": least, "at most": most}
        words = " and ".join(f"{word} {end:g}" for word, end in limits.items() if end is not None)
        raise argparse.ArgumentTypeError(f"{text}: must be {words}")
    return value


def config_name(arguments: argparse.Namespace) -> str:
    """Returns the name of the config without folder, suffix and argument: `rapid` of `configs/rapid.py:small`."""
    return pathlib.Path(arguments.config.partition(":")[0]).stem


def fields_from(arguments: argparse.Namespace, cls: type) -> dict[str, Any]:
    """Returns the flags that are called like fields of the dataclass `cls`."""
    return {field.name: getattr(arguments, field.name) for field in fields(cls) if hasattr(arguments, field.name)}


def override_flags(arguments: argparse.Namespace) -> tuple[str, ...]:
    """Returns the config overrides as they are written on a command line, to pass them on to other processes."""
    return tuple(f"{OVERRIDE}{key}={value}" for key, value in arguments.overrides.items())


def config_from(arguments: argparse.Namespace, *, needs_data: bool = False) -> "Config":
    """Returns the config that --config and its overrides describe; UserError lists everything that is wrong."""
    from jepa_jax.program.config import load_config, with_set_statistics

    return with_set_statistics(load_config(arguments.config, arguments.overrides), needs_data=needs_data)


def planned_config_from(arguments: argparse.Namespace) -> "Config":
    """Returns the config as `config_from` does, with what its recipe sets for GPUs."""
    from jepa_jax.config.recipe import assume_gpus

    with assume_gpus():
        return config_from(arguments)
