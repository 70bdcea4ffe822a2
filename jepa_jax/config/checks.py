"""Checks of single keys: type and limits of a value, and what was probably meant by a key that does not exist."""

import ast
import difflib
import math
from collections.abc import Mapping
from typing import Any

from jepa_jax.base.errors import UserError
from jepa_jax.config.owners import GROUPS
from jepa_jax.config.schema import Entry, Key, entries, listed_names


def checked_value(name: str, value: Any, known: Mapping[str, Entry], given: Mapping[str, Any]) -> Any:
    """Returns a value as the type of its dotted key; raises UserError for an unknown key or a value it cannot have."""
    if name not in known:
        raise UserError(unknown_key(name, known, given))
    return checked(name, value, known[name].key)


def checked(name: str, value: Any, key: Key) -> Any:
    """Returns a value as its key's type; refuses what has another type or lies outside the limits."""

    def refuse(why: str) -> UserError:
        return UserError(f"config.{name} = {value!r}: {why} ({key.meaning})")

    try:
        result = converted(value, key)
    except (KeyError, TypeError, ValueError, SyntaxError):
        raise refuse(f"must be of type {key.kind.__name__}") from None
    found_by_class = name in ("method.name", "model.name")  # a class of the user's own keeps the keys of its parent
    if key.choices and result not in key.choices and not ((key.outside or found_by_class) and ":" in result):
        own = ", nor package.module:function" if key.outside else ""
        raise refuse(f"not one of {', '.join(key.choices)}{own}")
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
