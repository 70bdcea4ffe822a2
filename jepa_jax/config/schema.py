"""Config groups: frozen dataclasses in which one declaration gives a key its type, default, meaning and limits.

A group that depends on a choice (`optim.name`, `method.loss`) declares the further keys of each choice as `variants`;
the keys of the choices that were not made do not exist in the resolved group. A key that lists names, such as
`method.view_groups`, declares the group that each name gets as `members`.
"""

import dataclasses
import functools
import hashlib
import inspect
import json
import keyword
import re
import types
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from jepa_jax.base.classes import find_class
from jepa_jax.base.errors import UserError

if TYPE_CHECKING:
    from jepa_jax.config.groups import Config

PROBABILITY: dict[str, Any] = {"least": 0, "most": 1}  # bounds of `key`

F = TypeVar("F", bound=Callable[..., Any])


@dataclasses.dataclass(frozen=True)
class Key:
    """What may stand under one key of a config.

    Attributes:
      default: the value if none is given; it sets the type of the key, and for a tuple the type of its entries.
      entry: type of the entries of a tuple whose default is empty.
      meaning: one line for people.
      choices: the only values allowed; empty if the limits decide.
      least, most: limits of a number, or of each number of a tuple.
      length: how many numbers a tuple has; None for any.
      nonempty: whether a tuple needs at least one number.
      increasing: whether a tuple is (smallest, largest).
      default_from: dotted key whose value is the default, e.g. "data.batch_size"; `default` where there is no such key.
      words: words that stand for a number, e.g. {"auto": -1}.
      variants: further keys by choice.
      outside: whether "package.module:function" of the user's own is a choice too; its further keys are its `Keys`.
      members: the key lists names, and a group of this class lies beside it under each of them.
    """

    default: Any
    meaning: str
    entry: type = float
    choices: tuple[str, ...] = ()
    least: float | None = None
    most: float | None = None
    length: int | None = None
    nonempty: bool = False
    increasing: bool = False
    default_from: str = ""
    words: Mapping[str, int] = dataclasses.field(default_factory=dict)
    variants: Mapping[str, "type[Group] | None"] = dataclasses.field(default_factory=dict)
    outside: bool = False
    members: "type[Group] | None" = None

    @property
    def kind(self) -> type:
        return type(self.default)


def key(default: Any, meaning: str, **limits: Any) -> Any:
    """Declares a key of a group; `limits` are the other attributes of `Key`."""
    if "variants" in limits:
        limits["choices"] = tuple(limits["variants"])
    return dataclasses.field(default=default, metadata={"key": Key(default, meaning, **limits)})


def subgroup(group: "type[Group]") -> Any:
    return dataclasses.field(default_factory=group)


class Problem(NamedTuple):
    key: str  # dotted, without "config."
    why: str


@dataclasses.dataclass(frozen=True)
class Group:
    def problems(self, config: "Config") -> Iterator[Problem]:
        """Yields combinations of values that cannot work; single values have been checked already."""
        del config
        yield from ()


class Entry(NamedTuple):
    """A key and the class that declares it."""

    key: Key
    owner: type[Group]


def all_problems(group: Group, config: "Config") -> Iterator[Problem]:
    """Yields what each class of a combined group, and each group inside it, finds wrong."""
    for cls in type(group).__mro__:
        if issubclass(cls, Group) and "problems" in cls.__dict__:
            yield from cls.problems(group, config)
    for field in dataclasses.fields(group):
        if isinstance(value := getattr(group, field.name), Group):
            yield from all_problems(value, config)


def remembered(function: F) -> F:
    """Returns `functools.cache` of a function with its types: mypy takes classes of dataclasses for unhashable."""
    cached: Any = functools.cache(function)
    return cached


@remembered
def combined(base: Any, *variants: Any) -> type[Group]:
    """Returns a group with the keys of `base` followed by those of the chosen variants."""
    if not variants:
        return base
    # The reverse order of bases is the order of fields.
    combination = type(base.__name__, (*reversed(variants), base), {"__doc__": base.__doc__})
    return dataclasses.dataclass(frozen=True)(combination)


@remembered
def declarations(group: type[Group]) -> tuple[tuple[str, Key | type[Group], type[Group]], ...]:
    """Returns name, declaration (a key, or the class of a group inside) and declaring class of each field."""
    if "__dataclass_fields__" not in group.__dict__:
        raise UserError(f"{group.__name__}: no dataclass; put @dataclasses.dataclass(frozen=True) above it")
    found: list[tuple[str, Key | type[Group], type[Group]]] = []
    for field in dataclasses.fields(group):
        owner = next(cls for cls in group.__mro__ if field.name in inspect.get_annotations(cls))
        found.append((field.name, field.metadata["key"] if "key" in field.metadata else inside(field), owner))
    return tuple(found)


def inside(field: dataclasses.Field) -> type[Group]:
    """Returns the class of a field that `subgroup` declared."""
    factory: Any = field.default_factory
    if not (isinstance(factory, type) and issubclass(factory, Group)):
        raise UserError(f"config key {field.name}: write its default as key(default, meaning)")
    return factory


@remembered
def entries(group: type[Group], prefix: str) -> Mapping[str, Entry]:
    """Returns every key of a group, also of groups inside it, by dotted name."""
    found: dict[str, Entry] = {}
    for name, declared, owner in declarations(group):
        if isinstance(declared, Key):
            found[prefix + name] = Entry(declared, owner)
        else:
            found |= entries(declared, f"{prefix}{name}.")
    return types.MappingProxyType(found)


def with_variants(group: type[Group], values: Mapping[str, Any], prefix: str = "") -> type[Group]:
    """Returns the group with the keys of the variants and with the members that `values` (or the defaults) choose."""
    chosen: list[Any] = []
    for name, declared, _ in declarations(group):
        if isinstance(declared, Key) and declared.variants:
            variant = variant_of(f"{prefix}{name}", declared, values.get(name, declared.default))
            chosen += [variant] if variant is not None else []
    base: Any = group
    taken = {name for name, _, _ in declarations(combined(base, *chosen))}
    for name, declared, _ in declarations(group):
        if isinstance(declared, Key) and declared.members is not None:
            for member in listed_names(values.get(name, declared.default)):
                if member in taken or not member.isidentifier() or keyword.iskeyword(member):
                    raise UserError(f"{prefix}{name}: {member!r} cannot be the name of a group here; use another")
                taken.add(member)
                members: Any = declared.members
                chosen.append(holding(member, members))
    return combined(base, *chosen)


def variant_of(name: str, key: Key, choice: Any) -> "type[Group] | None":
    """Returns the further keys of a choice, if it has any; raises UserError for a function that is not there."""
    if not (key.outside and ":" in str(choice)):
        return key.variants.get(str(choice))  # not yet checked: a file may hold a list here
    try:
        return getattr(find_class(name.removeprefix("config."), choice, {}), "Keys", None)
    except UserError as error:
        raise UserError(f"{error}, or choose from {', '.join(key.choices)}") from None


def listed_names(value: Any) -> tuple[str, ...]:
    """Returns a list of names; a text, as on a command line, has commas between them."""
    if isinstance(value, str):
        value = re.split(r"[\s,()\[\]'\"]+", value)
    parts = value if isinstance(value, list | tuple) else [value]
    return tuple(str(part) for part in parts if part)


@functools.cache
def holding(name: str, group: Any) -> type[Group]:
    """Returns a group that holds one group, under this name."""
    return dataclasses.make_dataclass(group.__name__, [(name, group, subgroup(group))], bases=(Group,), frozen=True)


@functools.cache
def following(group: Any, base: Any, path: str) -> type[Group]:
    """Returns the group with other defaults for what it inherits from `base`: the values of the same keys of `path`."""
    fields: list[tuple[str, Any, Any]] = []
    for name, declared, _ in declarations(base):
        if isinstance(declared, Key):
            same = dataclasses.replace(declared, default_from=f"{path}.{name}")
            fields.append((name, Any, dataclasses.field(default=declared.default, metadata={"key": same})))
        else:
            inner: Any = declared
            fields.append((name, Any, subgroup(following(inner, inner, f"{path}.{name}"))))
    return dataclasses.make_dataclass(group.__name__, fields, bases=(group,), frozen=True)


def flatten(config: Any, prefix: str = "") -> dict[str, Any]:
    """Returns nested groups or mappings as dotted keys; lists become tuples, so that JSON read back compares equal."""
    items = config.items() if hasattr(config, "items") else vars(config).items()
    flat: dict[str, Any] = {}
    for name, value in items:
        if isinstance(value, Mapping | Group) or hasattr(value, "items"):
            flat.update(flatten(value, f"{prefix}{name}."))
        else:
            flat[f"{prefix}{name}"] = tuple(value) if isinstance(value, list | tuple) else value
    return flat


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Returns dotted keys as nested dicts: the inverse of `flatten`."""
    tree: dict[str, Any] = {}
    for name, value in flat.items():
        *groups, last = name.split(".")
        branch = tree
        for group in groups:
            branch = branch.setdefault(group, {})
        branch[last] = value
    return tree


def differing(old: Any, new: Any) -> dict[str, tuple[Any, Any]]:
    """Returns the old and the new value of every dotted key in which two configs or mappings differ."""
    before, after = flatten(old), flatten(new)
    names = [name for name in sorted(before.keys() | after.keys()) if before.get(name) != after.get(name)]
    return {name: (before.get(name, "(absent)"), after.get(name, "(absent)")) for name in names}


def differing_keys(old: Any, new: Any, prefix: str = "config") -> list[str]:
    """Returns a line `prefix.key: old -> new` for every key in which two configs or mappings differ."""
    return [f"{prefix}.{name}: {before} -> {after}" for name, (before, after) in differing(old, new).items()]


def config_hash(config: Any) -> str:
    text = json.dumps(flatten(config), sort_keys=True, default=list)
    return hashlib.sha256(text.encode()).hexdigest()[:12]
