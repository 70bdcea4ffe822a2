"""From values to a complete, checked config; everything that is wrong is said in one answer."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from jepa_jax.base.classes import find_class, references, refuse_untrusted
from jepa_jax.base.errors import UserError
from jepa_jax.config.checks import checked_value
from jepa_jax.config.config_dicts import filled
from jepa_jax.config.groups import Config
from jepa_jax.config.owners import GROUPS, METHODS, structure
from jepa_jax.config.schema import Entry, Group, Problem, all_problems, entries, flatten, inside, nested


def resolve_stored(values: Mapping[str, Any], beside: Mapping[str, Any] | None = None) -> Config:
    """Returns the config that a file holds, perhaps of an earlier version: keys that are no longer read are dropped."""
    refuse_untrusted(filled(values)[0], set(references(flatten(beside or {}).values())))
    return resolve(values, lenient=True)


def resolve(values: Mapping[str, Any] | ConfigDict, *, lenient: bool = False, refused: Sequence[str] = ()) -> Config:
    """Returns the complete, checked config of `values` (nested or dotted) and the defaults.

    Args:
      values: what is given; keys that are missing get their defaults, texts are read as the type of their key.
      lenient: drops keys that are not read instead of refusing them.
      refused: complaints about values that could not be set; they are listed with the others.
    """
    given, complaints = filled(values)
    found, unknown = structure(given)
    complaints = [*refused, *complaints, *unknown]
    known = {name: entry for group, cls in found.items() for name, entry in entries(cls, f"{group}.").items()}
    parsed: dict[str, Any] = {}
    for name, value in given.items():
        if name not in known and (lenient or name.split(".")[0] in set(GROUPS) - set(found)):
            continue
        try:
            parsed[name] = checked_value(name, value, known, given)
        except UserError as error:
            complaints.append(str(error))
    if len(found) == len(GROUPS):  # a value that was refused is its default here, and nothing is said of it
        tree = nested(complete(parsed, known))
        groups: dict[str, Any] = {group: build_group(cls, tree[group]) for group, cls in found.items()}
        config = Config(**groups)
        flat, left_out = flatten(config), given.keys() - parsed.keys()
        problems = [problem for group in GROUPS for problem in all_problems(getattr(config, group), config)]
        problems += [] if problems or complaints else weights_problem(config)
        complaints += [f"config.{key} = {flat.get(key)!r}: {why}" for key, why in problems if key not in left_out]
    if complaints:
        raise UserError("\n".join(dict.fromkeys(complaints)))
    return config


def weights_problem(config: Config) -> Iterator[Problem]:
    """Yields a problem if evaluations are to read a copy of the encoder that the method does not keep."""
    if config.eval.weights == "target":
        ema = find_class("method.name", config.method.name, METHODS)(config, 1).ema
        if ema is None or "encoder" not in ema.modules:
            yield Problem("eval.weights", "this method keeps no copy of its encoder; use online")


def complete(parsed: Mapping[str, Any], known: Mapping[str, Entry]) -> dict[str, Any]:
    """Returns a value for every key: given, the value of another key, or the default."""
    defaults = {name: entry.key.default for name, entry in known.items()}
    values = {**defaults, **parsed}
    for name, entry in known.items():
        if entry.key.default_from and name not in parsed:
            values[name] = values.get(entry.key.default_from, entry.key.default)
    return values


def build_group(cls: type[Group], values: Mapping[str, Any]) -> Group:
    """Returns a group with these values; groups inside are nested mappings."""
    groups = {field.name: inside(field) for field in dataclasses.fields(cls) if "key" not in field.metadata}
    return cls(**{name: build_group(groups[name], v) if name in groups else v for name, v in values.items()})
