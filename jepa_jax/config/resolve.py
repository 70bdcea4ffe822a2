"""From values to a complete, checked config; everything that is wrong is said in one answer."""

import ast
import dataclasses
import difflib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jepa_jax.base.errors import UserError
from jepa_jax.config.groups import COMMON, Config, NamedGroup
from jepa_jax.config.schema import (
    Entry,
    Group,
    Key,
    Problem,
    all_problems,
    entries,
    flatten,
    inside,
    listed_names,
    nested,
    with_variants,
)

GROUPS = ("method", "model", *COMMON)
Owner = Callable[[str], type[NamedGroup]]  # the group that a method's or model's name stands for; raises UserError


def resolve(
    values: Mapping[str, Any],
    owners: Mapping[str, Owner],
    *,
    lenient: bool = False,
    more_problems: Callable[[Config], Iterator[Problem]] = lambda config: iter(()),
) -> Config:
    """Returns the config that `values` (nested or dotted) and the defaults make.

    Args:
      values: what differs from the defaults; texts are read as the type of their key.
      owners: for "method" and "model", the function that finds the group of a name.
      lenient: drops keys that are not read instead of refusing them, for configs written by earlier versions.
      more_problems: finds combinations that the groups cannot know of.

    Raises:
      UserError: lists every unknown key, wrong value and impossible combination.
    """
    given = flatten(values)
    found, complaints = structure(given, owners)
    known = {name: entry for group, cls in found.items() for name, entry in entries(cls, f"{group}.").items()}
    parsed: dict[str, Any] = {}
    for name, value in given.items():
        if name not in known:
            if not lenient and name.split(".")[0] not in set(GROUPS) - set(found):
                complaints.append(unknown_key(name, known, given))
            continue
        try:
            parsed[name] = checked(name, value, known[name].key)
        except UserError as error:
            complaints.append(str(error))
    if len(found) == len(GROUPS):  # a value that was refused is its default here, and nothing is said of it
        config = build(found, complete(parsed, known))
        flat, refused = flatten(config), given.keys() - parsed.keys()
        problems = [problem for group in GROUPS for problem in all_problems(getattr(config, group), config)]
        problems += [] if problems or complaints else more_problems(config)
        complaints += [f"config.{key} = {flat.get(key)!r}: {why}" for key, why in problems if key not in refused]
    if complaints:
        raise UserError("\n".join(dict.fromkeys(complaints)))
    return config


def structure(given: Mapping[str, Any], owners: Mapping[str, Owner]) -> tuple[dict[str, type[Group]], list[str]]:
    """Returns the class of each group for the names and variants that were chosen, and what could not be found."""
    found: dict[str, type[Group]] = {}
    complaints = []
    for group in GROUPS:
        try:
            base = owners[group](given.get(f"{group}.name", "")) if group in owners else COMMON[group]
            chosen = {name.removeprefix(f"{group}."): value for name, value in given.items()}
            found[group] = with_variants(base, chosen, f"config.{group}.")
        except UserError as error:
            complaints.append(str(error))
    return found, complaints


def overlay(base: Mapping[str, Any], changes: Mapping[str, Any], owners: Mapping[str, Owner]) -> dict[str, Any]:
    """Returns dotted values of `base` with `changes`; drops what the changed choices (method, loss, ...) do not read.

    A value of `base` is kept if the same class declares its key before and after: the rate of a loss that is replaced
    says nothing about the rate of the next one.
    """
    changed = {**base, **changes}
    before, after = (
        {name: entry.owner for group, cls in structure(flat, owners)[0].items() for name, entry in
         entries(cls, f"{group}.").items()}
        for flat in (base, changed)
    )  # fmt: skip
    unknown = set(GROUPS) - {name.split(".")[0] for name in after}  # groups with a wrong choice, refused later
    return {
        name: value
        for name, value in changed.items()
        if name in changes or name not in before or before[name] is after.get(name) or name.split(".")[0] in unknown
    }


def complete(parsed: Mapping[str, Any], known: Mapping[str, Entry]) -> dict[str, Any]:
    """Returns a value for every key: given, the value of another key, or the default."""
    defaults = {name: entry.key.default for name, entry in known.items()}
    values = {**defaults, **parsed}
    for name, entry in known.items():
        if entry.key.default_from and name not in parsed:
            values[name] = values.get(entry.key.default_from, entry.key.default)
    return values


def build(found: Mapping[str, type[Group]], values: Mapping[str, Any]) -> Config:
    tree = nested(values)
    groups: dict[str, Any] = {group: build_group(cls, tree[group]) for group, cls in found.items()}
    return Config(**groups)


def build_group(cls: type[Group], values: Mapping[str, Any]) -> Group:
    """Returns a group with these values; groups inside are nested mappings."""
    groups = {field.name: inside(field) for field in dataclasses.fields(cls) if "key" not in field.metadata}
    return cls(**{name: build_group(groups[name], v) if name in groups else v for name, v in values.items()})


def checked(name: str, value: Any, key: Key) -> Any:
    """Returns a value as its key's type; refuses what has another type or lies outside the limits."""

    def refuse(why: str) -> UserError:
        return UserError(f"config.{name} = {value!r}: {why} ({key.meaning})")

    try:
        result = converted(value, key)
    except (KeyError, TypeError, ValueError, SyntaxError):
        raise refuse(f"must be of type {key.kind.__name__}") from None
    own_class = name.endswith(".name") and ":" in str(result)  # a class of the user's, which was found
    if key.choices and result not in key.choices and not own_class:
        raise refuse(f"not one of {', '.join(key.choices)}")
    if key.length is not None and len(result) != key.length:
        raise refuse(f"needs {key.length} numbers")
    if key.nonempty and not result:
        raise refuse(f"needs at least one number, e.g. {key.default}")
    for part in result if isinstance(result, tuple) else (result,):
        if isinstance(part, str | bool):
            continue
        if not math.isfinite(part):
            raise refuse("must be finite")
        if (key.least is not None and part < key.least) or (key.most is not None and part > key.most):
            limits = {"at least": key.least, "at most": key.most}
            raise refuse("must be " + " and ".join(f"{word} {end}" for word, end in limits.items() if end is not None))
    if key.increasing and result[0] > result[1]:
        raise refuse("the smallest is above the largest; swap them")
    return result


def converted(value: Any, key: Key) -> Any:
    """Returns a value, or the text of one from a command line, as the type of its key; raises if it is none."""
    if isinstance(value, str) and value in key.words:
        return key.words[value]
    if isinstance(value, str) and key.kind is bool:
        return {"true": True, "1": True, "false": False, "0": False}[value.strip().lower()]
    if key.members is not None:
        return listed_names(value)
    if isinstance(value, str) and key.kind is not str:
        value = ast.literal_eval(value)
        if key.kind is tuple and not isinstance(value, list | tuple):
            value = (value,)
    if key.kind is tuple:
        if not isinstance(value, list | tuple):
            raise TypeError
        entry = type(key.default[0]) if key.default else key.entry
        return tuple(_number(part, entry) if entry in (int, float) else entry(part) for part in value)
    if key.kind in (int, float):
        return _number(value, key.kind)
    if not isinstance(value, key.kind):
        raise TypeError
    return value


def _number(value: Any, kind: type) -> int | float:
    if isinstance(value, bool) or not isinstance(value, int if kind is int else int | float):
        raise TypeError
    return kind(value)


def unknown_key(name: str, known: Mapping[str, Entry], given: Mapping[str, Any]) -> str:
    """Returns the message for a key that does not exist, with the nearest one that does."""
    group, _, last = name.partition(".")
    if name in GROUPS:
        return f"config.{name}: a group of keys, not a key; write config.{name}.KEY"
    if choice := other_choice(name, known):
        return f"config.{name}: only read with {choice}"
    if near := nearest_key(name, known):
        return f"config.{name}: unknown key; did you mean config.{near}?"
    if group not in GROUPS:
        return f"config.{name}: unknown key; the groups are {', '.join(GROUPS)}"
    listed = ", ".join(key.removeprefix(f"{group}.") for key in known if key.startswith(f"{group}."))
    chosen = f" {given.get(f'{group}.name')}" if group in ("method", "model") else ""
    return f"config.{name}: unknown key; {group}{chosen} has the keys {listed}"


def other_choice(name: str, known: Mapping[str, Entry]) -> str:
    """Returns the choices, as "method.loss = vicreg", that would make a key exist; "" if none would."""
    group, _, last = name.rpartition(".")
    return " or ".join(
        f"{key} = {choice}"
        for key, entry in known.items()
        for choice, variant in entry.key.variants.items()
        if variant is not None and key.rpartition(".")[0] == group and last in entries(variant, "")
    )


def nearest_key(name: str, known: Mapping[str, Any]) -> str | None:
    """Returns the key that was probably meant: spelled alike, abbreviated (learning_rate, lr), or in another group."""
    group, _, last = name.rpartition(".")
    same_group = [key for key in known if key.rpartition(".")[0] == group]
    alike = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
    short = [key for key in same_group if key.rpartition(".")[2] in _abbreviations(last)]
    long = [key for key in same_group if last in _abbreviations(key.rpartition(".")[2])]
    elsewhere = [key for key in known if key.rpartition(".")[2] in (last, *_abbreviations(last))]
    contained = [key for key in same_group if last in key]
    loose = difflib.get_close_matches(name, same_group, n=1, cutoff=0.6)
    return next(iter([*alike, *short, *long, *elsewhere, *contained, *loose]), None)


def _abbreviations(name: str) -> tuple[str, ...]:
    """Returns the initials of a name of several words."""
    words = name.split("_")
    return ("".join(word[:1] for word in words),) if len(words) > 1 else ()
