"""Recipes: config files that say what they change, shipped with the package or written by the user.

A recipe is a Python file whose `get_config()` returns nested dicts (or an ml_collections.ConfigDict) of the keys it
sets; the entry `base` names another recipe to start from. Its docstring says how to run it and what to expect.
`LADDER` may list sizes to compare: (name, changed keys) or (name, changed keys, memory in GB claimed elsewhere).
"""

import ast
import difflib
import functools
import importlib.util
import os
import pathlib
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

from jepa_jax.base.errors import UserError
from jepa_jax.base.machine import has_nvidia_driver
from jepa_jax.base.scope import Scope

PACKAGE = pathlib.Path(__file__).resolve().parents[1]
# In a clone the recipes lie beside the package, in an installed wheel inside it.
FOLDERS = (PACKAGE.parent / "configs", PACKAGE / "configs")
LADDER_FORM = "a list of (name, {key: value}) or (name, {key: value}, GB or (from GB, to GB))"

T = TypeVar("T")


class LadderStep(NamedTuple):
    """A size of a recipe: what it changes, and the memory in GB that others claim for it."""

    name: str
    changes: dict[str, Any]
    claimed_gb: tuple[float, ...] = ()  # empty, one figure, or from and to


@functools.cache
def shipped_recipes() -> dict[str, pathlib.Path]:
    """Returns the recipes that come with the package, by name."""
    folder = next((folder for folder in FOLDERS if (folder / "quickstart.py").exists()), FOLDERS[0])
    return {path.stem: path for path in sorted(folder.glob("[a-z]*.py"))}


def recipe_path(reference: str) -> pathlib.Path:
    """Returns the file of a recipe: a shipped name, or the path of a file."""
    recipes = shipped_recipes()
    if reference in recipes:
        return recipes[reference]
    path = pathlib.Path(reference).expanduser()
    if path.is_file():
        return path
    if path.parent.name == "configs" and path.stem in recipes:  # configs/rapid.py outside a clone
        return recipes[path.stem]
    near = difflib.get_close_matches(path.stem, recipes, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise UserError(
        f"--config={reference}: no such file or shipped config; the shipped ones are {', '.join(recipes)}{hint}"
    )


def by_machine(gpu: T, cpu: T) -> T:
    """Returns the first value where JAX may use an NVIDIA driver, and in plans; the second one elsewhere."""
    has_gpu = has_nvidia_driver() and os.environ.get("JAX_PLATFORMS", "") != "cpu"
    return gpu if has_gpu or assume_gpus else cpu


assume_gpus = Scope("assume_gpus")  # in which recipes are read for plans, which are for GPUs wherever they are made


def summary_of(path: pathlib.Path) -> str:
    """Returns the first line of a recipe's docstring, without running the file."""
    return (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]


def read_recipe(reference: str) -> dict[str, Any]:
    """Returns what the `get_config` of a recipe returns; `file.py:argument` passes an argument to it."""
    argument = reference.partition(".py:")[2]
    values = _from_file(reference, lambda module: module.get_config(*([argument] if argument else [])))
    values = values.to_dict() if hasattr(values, "to_dict") else values
    if not isinstance(values, Mapping):
        raise UserError(f"--config={reference}: get_config() returns {type(values).__name__}; return nested dicts")
    return dict(values)


def read_ladder(reference: str) -> list[LadderStep]:
    """Returns the `LADDER` of a recipe; empty if it has none."""
    ladder = _from_file(reference, lambda module: getattr(module, "LADDER", ()))
    try:
        return [_ladder_step(*step) for step in ladder]
    except (TypeError, ValueError) as error:
        raise UserError(f"--config={reference}: LADDER ({error}); write {LADDER_FORM}") from error


def _ladder_step(name: str, changes: Mapping[str, Any], claimed: Any = ()) -> LadderStep:
    figures = claimed if isinstance(claimed, tuple | list) else (claimed,)
    return LadderStep(str(name), dict(changes), tuple(float(figure) for figure in figures))


def _from_file(reference: str, read: Callable[[ModuleType], T]) -> T:
    """Returns what `read` finds in the file of a recipe."""
    path_text, _, argument = reference.partition(".py:")
    path = recipe_path(path_text + (".py" if argument else ""))
    spec = importlib.util.spec_from_file_location(f"_recipe_{path.stem}", path)
    if spec is None or spec.loader is None:  # by its name, Python does not know what to do with it
        raise UserError(f"--config={reference}: no .py file; name a shipped config or a file such as configs/rapid.py")
    module = importlib.util.module_from_spec(spec)
    writes_bytecode, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        spec.loader.exec_module(module)
        return read(module)
    except Exception as error:  # whatever the file does wrong
        raise UserError(
            f"--config={reference}: cannot be loaded ({type(error).__name__}: {error}); fix the file"
        ) from error
    finally:
        sys.dont_write_bytecode = writes_bytecode
