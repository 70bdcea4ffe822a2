"""Overrides of a config on a command line, in the form of `ml_collections.config_flags`."""

import re
from collections.abc import Callable, Sequence

from ml_collections import ConfigDict

from jepa_jax.base.errors import UserError
from jepa_jax.config.config_dicts import checked_overrides, dropped_values, set_values, with_choices_of
from jepa_jax.config.recipe import read_recipe

OVERRIDE = re.compile(r"--?(no)?config\.([^=]+)(?:=(.*))?", re.DOTALL)


def parse_config(
    reference: str, override_flags: Sequence[str], warn: Callable[[str], object] = lambda text: None
) -> ConfigDict:
    """Returns the config of a recipe with overrides; lists every key and value that is wrong.

    Unlike those of `config_flags`, an override may change a choice (`--config.method.loss=sigreg`) and the keys of the
    new choice.
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
    set_values(config, chosen)
    return config


def key_and_text(flag: str) -> tuple[str, str]:
    """Returns dotted key and text of `--config.KEY=TEXT`; a switch may be `--config.KEY` or `--noconfig.KEY`."""
    match = OVERRIDE.fullmatch(flag)
    if match is None:
        raise UserError(f"{flag}: write --config.group.key=VALUE")
    negated, name, text = match.groups()
    return name, text if text is not None else "false" if negated else "true"
