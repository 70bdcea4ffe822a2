"""Complete `ml_collections.ConfigDict`s, made from the declarations of the keys."""

import copy
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict
from ml_collections.config_dict import RequiredValueError

from jepa_jax.base.errors import UserError
from jepa_jax.config.checks import checked_value
from jepa_jax.config.owners import GROUPS, dropped_keys, known_keys, needs_encoder, structure
from jepa_jax.config.schema import Entry, flatten

FORMER = "former name of "  # how the meaning of a key begins that only configs of earlier versions have


def default_config(method: str = "image_jepa", model: str = "", **choices: Any) -> ConfigDict:
    """Returns a config with every key that these choices have, at its default.

    Args:
      method: value of `method.name`.
      model: value of `model.name`; by default resnet18, or nothing for a method with a model of its own.
      **choices: further keys that decide which keys there are, with "." written "__".

    Example:
      config = default_config("image_jepa", "resnet10", method__loss="sigreg", optim__name="adamw")
      config.optim.lr = 1e-3
    """
    model = model or ("resnet18" if needs_encoder(method) else "")
    return with_choices(ConfigDict(), method__name=method, model__name=model, **choices)


def with_choices(config: ConfigDict, **choices: Any) -> ConfigDict:
    """Returns a copy with other choices: keys that only the old ones have give way to those of the new ones.

    Args:
      config: a complete config.
      **choices: keys that decide which keys there are, with "." written "__".

    Example:
      config = with_choices(quickstart.get_config(), method__name="byol")
    """
    return chosen(config, {name.replace("__", "."): value for name, value in choices.items()})


def chosen(config: Mapping[str, Any] | ConfigDict, choices: Mapping[str, Any]) -> ConfigDict:
    """Returns a complete copy with `choices`, by dotted key, without the keys that they replace.

    Missing keys get their defaults; references stay references.
    """
    result = copy.deepcopy(config if isinstance(config, ConfigDict) else ConfigDict(config)).unlock()
    given, _ = filled(result)
    for name in dropped_keys(given, choices):
        delete(result, name)
    set_values(result, choices)
    missing = {name: entry for name, entry in known_keys({**given, **choices}).items() if not holds(result, name)}
    set_values(result, {name: entry.key.default for name, entry in missing.items()})
    for name, entry in missing.items():
        source = entry.key.default_from
        if source and holds(result, source):  # the key follows this one until it is set itself
            group, _, last = source.rpartition(".")
            set_values(result, {name: find_group(result, group).get_oneway_ref(last)})
    return result


def filled(values: Mapping[str, Any] | ConfigDict, prefix: str = "") -> tuple[dict[str, Any], list[str]]:
    """Returns the values by dotted key, and a complaint about every placeholder that was not filled."""
    if not isinstance(values, ConfigDict):
        return flatten(values), []
    flat: dict[str, Any] = {}
    empty: list[str] = []
    for name in values:
        try:
            value = values[name]
        except RequiredValueError:
            value = None
        if isinstance(value, ConfigDict):
            inner, more = filled(value, f"{prefix}{name}.")
            flat |= inner
            empty += more
        elif value is None:
            empty.append(f"config.{prefix}{name}: an unfilled placeholder; set it")
        else:
            flat[f"{prefix}{name}"] = tuple(value) if isinstance(value, list | tuple) else value
    return flat, empty


def set_values(config: ConfigDict, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        *groups, last = name.split(".")
        inner = config
        for group in groups:
            if group not in inner:
                inner[group] = ConfigDict()
            inner = inner[group]
        inner[last] = value


def holds(config: ConfigDict, name: str) -> bool:
    group, _, last = name.partition(".")
    return group in config and (not last or holds(config[group], last))


def find_group(config: ConfigDict, path: str) -> ConfigDict:
    for group in filter(None, path.split(".")):
        config = config[group]
    return config


def delete(config: ConfigDict, name: str) -> None:
    group, _, last = name.rpartition(".")
    del find_group(config, group)[last]
    if group and not find_group(config, group):
        delete(config, group)


def overridden(config: ConfigDict, overrides: Mapping[str, Any]) -> tuple[ConfigDict, list[str]]:
    """Returns a complete copy with other values, and a complaint about each of them that cannot be set."""
    values, known, complaints = checked_overrides(config, overrides)
    result = with_choices_of(config, values, known)
    set_values(result, values)
    return result, complaints


def checked_overrides(
    config: ConfigDict, overrides: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Entry], list[str]]:
    """Returns the overrides that can be set, as the types of their keys; all keys; and what is wrong with the others.

    Keys of a group whose choice is wrong (`model.name=resnet19`) are left out: only the choice is complained about.
    """
    before = filled(config)[0]
    given = {**before, **overrides}
    found, complaints = structure(given)
    known = known_keys(given)
    complaints += unread_former_names(before, overrides, known)
    values = {}
    for name, value in overrides.items():
        if name.partition(".")[0] in set(GROUPS) - set(found):
            continue
        try:
            values[name] = checked_value(name, value, known, given)
        except UserError as error:
            complaints.append(str(error))
    return values, known, complaints


def unread_former_names(
    before: Mapping[str, Any], overrides: Mapping[str, Any], known: Mapping[str, Entry]
) -> list[str]:
    """Returns a complaint about each former name of a key that has a value of its own, which alone is read."""
    pairs = [
        (name, f"{name.rpartition('.')[0]}.{known[name].key.meaning.rpartition('.')[2]}")
        for name in overrides.keys() & known.keys()
        if known[name].key.meaning.startswith(FORMER)
    ]
    return [
        f"config.{name} = {overrides[name]}: is not read, as config.{new} is set; set that one"
        for name, new in pairs
        if new in overrides or before.get(new) != before.get(name)
    ]


def with_choices_of(config: ConfigDict, values: Mapping[str, Any], known: Mapping[str, Entry]) -> ConfigDict:
    """Returns a complete copy in which those of the values are set that decide which keys there are."""
    choices = {}
    for name, value in values.items():
        key = known[name].key
        if key.variants or key.members is not None or name in ("method.name", "model.name"):
            choices[name] = value
    return chosen(config, choices)


def dropped_values(config: ConfigDict, overrides: Mapping[str, Any]) -> list[str]:
    """Returns `key = value` for each value, other than a default, that another method drops from the method's keys."""
    given, _ = filled(config)
    known, dropped = known_keys(given), dropped_keys(given, overrides) - overrides.keys()
    return [
        f"{name} = {value}"
        for name, value in given.items()
        if name in dropped and name.startswith("method.")
        if value not in (known[name].key.default, given.get(known[name].key.default_from))
    ]
