"""Flags of commands: absl's own, with `--config` as `ml_collections.config_flags` reads it."""

import difflib
import pathlib
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

from absl import flags

from jepa_jax.base.console import Console, print_result
from jepa_jax.base.errors import EXIT_OK, UserError

if TYPE_CHECKING:
    from jepa_jax.config.groups import Config

CONFIG_HELP = (
    "name of a shipped config (jepa-jax configs lists them), FILE.py, either with :ARGUMENT, or the config.json of a "
    "run; --config.group.key=VALUE changes a key"
)
OVERRIDE_FLAG = re.compile(r"--?(no)?config\..*", re.DOTALL)
JAX_FLAG = re.compile(r"--(no)?(jax_\w+)(?:=(.*))?")
INDENT: Any = {"initial_indent": " " * 6, "subsequent_indent": " " * 6}
DEFINE: dict[type, Callable[..., Any]] = {
    str: flags.DEFINE_string,
    int: flags.DEFINE_integer,
    float: flags.DEFINE_float,
}


class Arguments(SimpleNamespace):
    """The values of a command's flags and words.

    Attributes:
      config: the recipe that `--config` names, where the command takes one.
      override_flags: the flags that change keys of the config, as they were given.
      jax_flags: values of `--jax_...` flags.
    """

    config: str
    override_flags: list[str]
    jax_flags: dict[str, str]


class Words(NamedTuple):
    """Arguments that are no flags."""

    name: str
    help: str
    choices: Sequence[str] = ()
    least: int = 1
    most: int | None = 1  # None for any number


class Parser:
    """Declares and parses the flags of one command; an invalid flag raises UserError with a suggestion."""

    def __init__(self, program: str, description: str = ""):
        self.program, self.description = program, description
        self._values = flags.FlagValues()
        self._values.set_gnu_getopt()
        self._shown: dict[str, str] = {}  # metavar of each flag, in the order of --help
        self._words: list[Words] = []

    def add_config(self, default: str | None = None) -> None:
        """Adds --config, which must be given if it has no default, and --config.group.key=VALUE."""
        self.add_flag("config", "NAME", CONFIG_HELP, default, required=default is None)
        self.add_trust()

    def add_trust(self) -> None:
        """Adds --trust, for commands that read the config of a run or of weights."""
        self.add_switch("trust", "import classes that the config.json of a run, or of weights, names: runs their code")

    def add_flag(
        self,
        name: str,
        metavar: str,
        help: str,
        default: Any = None,
        *,
        kind: type | None = None,
        least: float | None = None,
        most: float | None = None,
        required: bool = False,
        short: str | None = None,
    ) -> None:
        """Adds --name=VALUE of type `kind` (default: that of `default`), within limits."""
        kind = kind or (str if default is None else type(default))
        limits = {} if kind is str else {"lower_bound": least, "upper_bound": most}
        DEFINE[kind](name, default, help, flag_values=self._values, required=required, short_name=short, **limits)
        self._shown[name] = f"={metavar}"

    def add_choice(self, name: str, choices: Sequence[str], help: str, default: str) -> None:
        """Adds --name=VALUE with one of a few values."""
        flags.DEFINE_enum(name, default, choices, help, flag_values=self._values)
        self._shown[name] = f"={'|'.join(choices)}"

    def add_list(self, name: str, metavar: str, help: str) -> None:
        """Adds --name=VALUE, which may be repeated; the value is the list of all."""
        flags.DEFINE_multi_string(name, None, help, flag_values=self._values)
        self._shown[name] = f"={metavar}"

    def add_switch(self, name: str, help: str, default: bool = False) -> None:
        """Adds a flag that is on or off: --name, --noname or --name=true."""
        flags.DEFINE_boolean(name, default, help, flag_values=self._values)
        self._shown[name] = ""

    def add_switch_or_value(self, name: str, metavar: str, help: str) -> None:
        """Adds --name, whose value is True, or --name=VALUE."""
        flags.DEFINE_string(name, None, help, flag_values=self._values)
        self._values[name].boolean = True  # absl then takes no word after it for its value
        self._shown[name] = f"[={metavar}]"

    def add_words(
        self, name: str, help: str, *, choices: Sequence[str] = (), least: int = 1, most: int | None = 1
    ) -> None:
        """Adds arguments without a flag, or after `--`: one word, or a list if `most` is not 1."""
        self._words.append(Words(name, help, choices, least, most))

    def has_flag(self, name: str) -> bool:
        return name in self._values

    def parse(self, argv: Sequence[str]) -> Arguments:
        """Returns the values of the command line; --help prints the flags and exits with code 0."""
        own, overrides, jax_flags = self._sorted(self._values.read_flags_from_files(list(argv), force_gnu=False))
        if asked := {"-h", "--help", "--helpfull"} & set(own):
            print_result(self.help_text(full="--helpfull" in asked))
            sys.exit(EXIT_OK)
        try:
            words = self._values([self.program, *own])[1:]
        except flags.UnrecognizedFlagError as error:
            near = self._near(error.flagname)
            raise UserError(f"--{error.flagname}: no such flag; {near}") from None
        except flags.Error as error:
            message = re.sub(r"\('(.*)', '.*'\)", r"\1", str(error))  # of booleans
            message = re.sub(r".*Flag (--\w+) must have a value other than None\.", r"missing: \1", message)
            raise UserError(f"{message.removeprefix('flag ')}; see {self.program} --help") from None
        values = {name: self._value(name) for name in self._shown} | self._taken(words)
        return Arguments(**values, override_flags=overrides, jax_flags=jax_flags)

    def _near(self, name: str) -> str:
        """Returns what to write instead of an unknown flag: a key of the config that ends so, or the nearest flag."""
        if self.has_flag("config"):
            from jepa_jax.runtime.platforms import import_jax

            import_jax()
            from jepa_jax.config.schema import flatten
            from jepa_jax.program.config import load_config

            keys = [key for key in flatten(load_config("image_jepa").to_dict()) if key.endswith(f".{name}")]
            if keys:
                return f"did you mean {' or '.join(f'--config.{key}' for key in keys)}?"
        return suggestion(f"--{name}", [f"--{known}" for known in self._values], self.program)

    def _value(self, name: str) -> Any:
        flag = self._values[name]
        is_switch = flag.boolean and flag.value in ("true", "false")  # of `add_switch_or_value`
        return flag.value == "true" if is_switch else flag.value

    def _sorted(self, argv: Sequence[str]) -> tuple[list[str], list[str], dict[str, str]]:
        """Returns a command line in three parts: the command's own flags, overrides of its config, flags of jax."""
        own: list[str] = []
        overrides: list[str] = []
        of_jax: dict[str, str] = {}
        rest = list(argv)
        while rest:
            argument = rest.pop(0)
            if argument == "--":
                return [*own, argument, *rest], overrides, of_jax
            if self.has_flag("config") and OVERRIDE_FLAG.fullmatch(argument):
                if "=" not in argument and rest and not rest[0].startswith("-"):  # its value is the next word
                    argument = f"{argument}={rest.pop(0)}"
                overrides.append(argument)
            elif match := JAX_FLAG.fullmatch(argument):
                negated, name, value = match.groups()
                of_jax[name] = "False" if negated else "True" if value is None else value
            else:
                own.append(self._with_underscores(argument))
        return own, overrides, of_jax

    def _with_underscores(self, argument: str) -> str:
        """Returns a flag that is written with hyphens as it is declared: --batch-size, --no-variants."""
        flag, equals, value = argument.partition("=")
        name = flag[2:].replace("-", "_")
        if not flag.startswith("--") or "-" not in flag[2:]:
            return argument
        if name.startswith("no_") and name[3:] in self._values:
            return f"--no{name[3:]}"
        return f"--{name}{equals}{value}" if name in self._values else argument

    def _taken(self, words: Sequence[str]) -> dict[str, Any]:
        """Returns the words by the names that `add_words` gave them."""
        found: dict[str, Any] = {}
        for one in self._words:
            taken, words = (words, []) if one.most is None else (words[: one.most], words[one.most :])
            if len(taken) < one.least:
                raise UserError(f"{one.name}: missing; see {self.program} --help")
            if one.choices and (wrong := [word for word in taken if word not in one.choices]):
                raise UserError(f"{one.name} = {wrong[0]!r}: not one of {', '.join(one.choices)}")
            found[one.name] = taken if one.most != 1 else next(iter(taken), None)
        if words:
            raise UserError(f"unexpected argument {words[0]!r}; flags are written --name=value")
        return found

    def help_text(self, *, full: bool = False) -> str:
        """Returns what --help prints: what the command does, then its flags; `full` adds the flags of absl."""
        rows = [(one.name, one.help) for one in self._words]
        for name, metavar in self._shown.items():
            flag = self._values[name]
            default = "" if flag.default in (None, "", False) else f" (default: {flag.default_as_str})"
            off = f"; --no{name} switches it off" if flag.boolean and flag.default else ""
            rows.append((f"--{name}{metavar}", f"{flag.help}{default}{off}"))
        rows.append(("--flagfile=FILE", "reads flags from a file"))
        rows.append(("--jax_NAME=VALUE", "sets an option of jax"))
        rows.append(("--helpfull", "also shows the flags of absl"))
        lines = [line for name, help in rows for line in (f"  {name}", textwrap.fill(help, 112, **INDENT))]
        more = ["", flags.FLAGS.get_help()] if full else []
        return "\n".join([f"usage: {self.program} [flags]", "", self.description.strip(), "", "flags:", *lines, *more])


def suggestion(word: str, known: Iterable[str], program: str) -> str:
    """Returns what to say about a mistyped word: the nearest known one, or where all of them are listed."""
    names = {name.lower().replace("-", "_"): name for name in known}
    close = difflib.get_close_matches(word.lower().replace("-", "_"), names, n=1)
    return f"did you mean {names[close[0]]}?" if close else f"{program} --help lists them"


def config_name(arguments: Arguments) -> str:
    """Returns the name of the config without folder, suffix and argument: `rapid` of `configs/rapid.py:small`."""
    return pathlib.Path(arguments.config.partition(":")[0]).stem


def fields_from(arguments: Arguments, cls: type) -> dict[str, Any]:
    """Returns the flags that are called like fields of the dataclass `cls`."""
    return {field.name: vars(arguments)[field.name] for field in fields(cls) if field.name in vars(arguments)}


def given_keys(arguments: Arguments) -> dict[str, str]:
    """Returns the overrides of the config as text, by dotted key."""
    from jepa_jax.config.flags import key_and_text

    return dict(map(key_and_text, arguments.override_flags))


def config_from(arguments: Arguments, *, needs_data: bool = False) -> "Config":
    """Returns the config that --config and its overrides describe; UserError lists everything that is wrong."""
    from jepa_jax.config.flags import parse_config
    from jepa_jax.program.config import load_config, with_set_statistics

    config = load_config(parse_config(arguments.config, arguments.override_flags, Console().warn))
    return with_set_statistics(config, needs_data=needs_data)


def planned_config_from(arguments: Arguments) -> "Config":
    """Returns the config as `config_from` does, with what its recipe sets for GPUs."""
    from jepa_jax.config.recipe import assume_gpus

    with assume_gpus():
        return config_from(arguments)
