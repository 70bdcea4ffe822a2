"""Overrides of a config on a command line, as `ml_collections.config_flags` reads them."""

import re
from collections.abc import Sequence

from absl import flags
from ml_collections import ConfigDict, config_flags

from jepa_jax.base.errors import UserError
from jepa_jax.config.checks import checked_value
from jepa_jax.config.config_dicts import with_choices_of
from jepa_jax.config.recipe import read_recipe
from jepa_jax.config.schema import Key, flatten, listed_names

OVERRIDE = re.compile(r"--?(no)?config\.([^=]+)(?:=(.*))?", re.DOTALL)


def parse_config(reference: str, override_flags: Sequence[str]) -> ConfigDict:
    """Returns the config of a recipe with overrides, parsed by config_flags.

    Keys that decide which keys there are (`--config.method.loss=sigreg`) are set before config_flags looks up the types
    of the others, so that the keys of the new choice exist.

    Args:
      reference: what `read_recipe` takes.
      override_flags: flags such as `--config.optim.lr=0.1`.

    Raises:
      UserError: lists every key and value that is wrong.
    """
    overrides = dict(map(key_and_text, override_flags))
    config, known = with_choices_of(read_recipe(reference), overrides)
    complaints = []
    for flag, (name, text) in zip(override_flags, map(key_and_text, override_flags), strict=True):
        if "=" not in flag and name in known and known[name].key.kind is not bool:
            complaints.append(f"{flag}: no value; write {flag}=VALUE")
            continue
        try:
            checked_value(name, text, known, flatten(config))
        except UserError as error:
            complaints.append(str(error))
    if complaints:
        raise UserError("\n".join(complaints))
    values = flags.FlagValues()
    argv = ["", *(f"--config.{name}={literal(text, known[name].key)}" for name, text in overrides.items())]
    config_flags.DEFINE_config_dict("config", config, flag_values=values, sys_argv=argv)
    try:
        values(argv)
    except flags.Error as error:  # a text that config_flags reads otherwise than the declaration of its key
        raise UserError(f"{error}; see jepa-jax describe for the keys of the config") from error
    return values.config


def key_and_text(flag: str) -> tuple[str, str]:
    """Returns dotted key and text of `--config.KEY=TEXT`; a switch may be `--config.KEY` or `--noconfig.KEY`."""
    match = OVERRIDE.fullmatch(flag)
    if match is None:
        raise UserError(f"{flag}: write --config.group.key=VALUE")
    negated, name, text = match.groups()
    return name, text if text is not None else "false" if negated else "true"


def literal(text: str, key: Key) -> str:
    """Returns the text of a value as config_flags reads it: words as numbers, lists in brackets."""
    if text in key.words:
        return str(key.words[text])
    if key.members is not None:
        return repr(listed_names(text))
    if key.kind is tuple and not text.strip().startswith(("(", "[")):
        return f"({text},)"
    return text
