"""Classes by name: those of this package, and `package.module:Class` from the user's PYTHONPATH."""

import difflib
import importlib
from collections.abc import Mapping
from typing import Any

from jepa_jax.base.errors import UserError


def find_class(key: str, name: str, known: Mapping[str, str], *, needs: str = "") -> Any:
    """Returns the class that `name` stands for.

    Args:
      key: the config key that holds the name, for messages.
      name: an entry of `known`, or "package.module:Class".
      known: names of this package and where their classes are.
      needs: an attribute that the class must have.
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
