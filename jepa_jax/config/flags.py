"""Overrides of a config on a command line, as `ml_collections.config_flags` reads them."""

import re
from collections.abc import Callable, Sequence

from absl import flags
from ml_collections import ConfigDict, config_flags

from jepa_jax.base.errors import UserError
from jepa_jax.config.config_dicts import checked_overrides, dropped_values, with_choices_of
from jepa_jax.config.recipe import read_recipe
from jepa_jax.config.schema import Key, listed_names

OVERRIDE = re.compile(r"--?(no)?config\.([^=]+)(?:=(.*))?", re.DOTALL)


def parse_config(
    reference: str, override_flags: Sequence[str], warn: Callable[[str], object] = lambda text: None
) -> ConfigDict:
    """Returns the config of a recipe with overrides, parsed by config_flags.

    Keys that decide which keys there are (`--config.method.loss=sigreg`) are set before config_flags looks up the types
    of the others, so that the keys of the new choice exist.
    """
    recipe = read_recipe(reference)
    given = [key_and_text(flag) for flag in override_flags]
    known = checked_overrides(recipe, dict(given))[1]
    overrides: dict[str, str] = {}
    for name, text in given:  # tuples may be given by repeated flags
        repeated = name in overrides and name in known and known[name].key.kind is tuple
        overrides[name] = f"{overrides[name]},{text}" if repeated else text
    valueless = {
        name: f"{flag}: no value; write {flag}=VALUE"
        for flag, (name, _) in zip(override_flags, given, strict=True)
        if "=" not in flag and name in known and known[name].key.kind is not bool
    }
    checked = {name: text for name, text in overrides.items() if name not in valueless}
    chosen, known, complaints = checked_overrides(recipe, checked)
    if complaints or valueless:
        raise UserError("\n".join([*valueless.values(), *complaints]))
    if "method.name" in overrides and (dropped := dropped_values(recipe, overrides)):
        method = overrides["method.name"]
        warn(f"config.method.name = {method}: drops values that {recipe.method.name} had: {', '.join(dropped)}")
    config = with_choices_of(recipe, chosen, known)
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
