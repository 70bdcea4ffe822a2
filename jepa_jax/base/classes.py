"""Finds classes by name: those of the core and of projects, and `package.module:Class` from the user's PYTHONPATH."""

import collections
import difflib
import functools
import importlib
import pkgutil
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from jepa_jax.base.errors import UserError
from jepa_jax.base.scope import Scope

PROJECTS = "jepa_jax.projects"
REFERENCE = re.compile(r"(?!tfds:)[A-Za-z_][\w.]*:[A-Za-z_]\w*")  # to a class or function
trust_files = Scope("trust_files")  # in which files that were read may name classes of anybody's


class ClassTable(collections.UserDict[str, str]):
    """Maps the names of one kind of class to "module:Class", for the core and for every project.

    A project is a package below `jepa_jax.projects`. The variables of its `__init__.py` that are named like a table are
    the project's entries; they are read when the table is first used.

    Example:
      METHODS = ClassTable("METHODS", {"byol": "jepa_jax.methods.byol:Byol"})
    """

    def __init__(self, name: str, core: Mapping[str, str]):
        """Takes the name that the table has in projects, and the entries of the core."""
        self._name, self._core = name, core

    @functools.cached_property
    def data(self) -> dict[str, str]:  # type: ignore[override]
        entries = dict(self._core)
        for module in pkgutil.iter_modules(importlib.import_module(PROJECTS).__path__, f"{PROJECTS}."):
            entries |= vars(importlib.import_module(module.name)).get(self._name, {})
        return entries


def load_object(reference: str) -> Any:
    """Returns what "module:name" refers to."""
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)


def import_extra(module: str, where: str, extra: str) -> Any:
    """Imports a package that only an extra installs; UserError for what is named by `where` says how to get it."""
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise UserError(f"{where}: needs the package {package}; pip install 'jepa_jax[{extra}]'") from None


def find_class(key: str, name: str, known: Mapping[str, str], *, needs: str = "") -> Any:
    """Returns the class that the value of a config key names: an entry of `known`, or "package.module:Class".

    `needs` is an attribute that the class must have.
    """
    reference = str(known.get(name, name))
    module_name, _, class_name = reference.partition(":")
    if not class_name:
        near = difflib.get_close_matches(reference, known, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UserError(f"config.{key} = {name!r}: not one of {', '.join(known)}, nor package.module:Class{hint}")
    try:
        found = getattr(importlib.import_module(module_name), class_name, None)
    except ModuleNotFoundError as error:
        if error.name != module_name and not module_name.startswith(f"{error.name}."):
            raise  # the module is there, something that it imports is not
        raise UserError(
            f"config.{key} = {name!r}: there is no module {error.name}; add its folder to PYTHONPATH"
        ) from None
    if found is None:
        raise UserError(f"config.{key} = {name!r}: {module_name} has no class {class_name}")
    if needs and not hasattr(found, needs):
        raise UserError(
            f"config.{key} = {name!r}: this class has no attribute {needs}; see docs/guides/write_a_method.md"
        )
    return found


def references(values: Iterable[Any]) -> Iterator[str]:
    """Yields the values, and entries of tuples and lists, that name a class or function as "package.module:Class"."""
    for value in values:
        if isinstance(value, tuple | list):
            yield from references(value)
        elif isinstance(value, str) and REFERENCE.fullmatch(value):
            yield value


def refuse_untrusted(values: Mapping[str, Any], trusted: Collection[str] = ()) -> None:
    """Raises UserError if the values of a config that was read from a file name a class: importing it runs its code.

    Modules of the user's own that this program has imported already may be named.
    """
    for key, value in values.items():
        for name in references([value]):
            module = name.partition(":")[0]
            is_imported = module in sys.modules and module.partition(".")[0] not in sys.stdlib_module_names
            if not trust_files and name not in trusted and not is_imported:
                raise UserError(
                    f"config.{key} = {name!r}: is named by a file, and importing it runs its code; add --trust if you "
                    "know where the file comes from (in Python: with jepa_jax.trust_files())"
                )
