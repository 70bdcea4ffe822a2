"""Recipes: config files, shipped with the package or written by the user.

A recipe is a Python file whose `get_config()` returns an `ml_collections.ConfigDict`; keys that it leaves out get their
defaults. Its docstring says how to run it and what to expect. `LADDER` may list sizes to compare: (name, changed keys)
or (name, changed keys, memory in GB claimed elsewhere).
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

from ml_collections import ConfigDict

from jepa_jax.base.errors import UserError
from jepa_jax.base.files import read_json, user_path
from jepa_jax.base.machine import has_nvidia_driver
from jepa_jax.base.scope import Scope
from jepa_jax.config.config_dicts import chosen
from jepa_jax.config.resolve import resolve_stored

FOLDER = pathlib.Path(__file__).resolve().parents[1] / "configs"  # in a clone a link to the folder beside the package
STATISTICS = ("data.augment.mean", "data.augment.std")
LADDER_FORM = "a list of (name, {key: value}) or (name, {key: value}, GB or (from GB, to GB))"

T = TypeVar("T")


class LadderStep(NamedTuple):
    """A size of a recipe: what it changes, and the memory in GB that others claim for it."""

    name: str
    changes: dict[str, Any]
    claimed_gb: tuple[float, ...] = ()  # empty, one figure, or from and to


@functools.cache
def shipped_recipes() -> dict[str, pathlib.Path]:
    return {path.stem: path for path in sorted(FOLDER.glob("[a-z]*.py"))}


def recipe_path(reference: str) -> pathlib.Path:
    recipes = shipped_recipes()
    if reference in recipes:
        return recipes[reference]
    path = user_path(reference, "--config")
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
    return (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]


def split_argument(reference: str) -> tuple[str, str]:
    """Returns the recipe and the argument of `rapid:argument` or `file.py:argument`; "" without one."""
    name, _, argument = reference.partition(":")
    return (name, argument) if name in shipped_recipes() or name.endswith(".py") else (reference, "")


def read_recipe(reference: str) -> ConfigDict:
    """Returns what the `get_config` of a recipe returns, complete.

    `reference` is the name of a shipped recipe or the path of a .py file, either with `:argument`, which is passed to
    `get_config`; or a run: its folder or its config.json, perhaps of an earlier version.
    """
    path = user_path(reference, "--config")
    path = path / "config.json" if path.is_dir() else path
    if path.suffix == ".json" and path.is_file():
        return chosen(resolve_stored(read_json(path, "name that of a run")).to_dict(), {})
    arguments = filter(None, [split_argument(reference)[1]])
    config = _from_file(reference, lambda module: module.get_config(*arguments))
    if not isinstance(config, Mapping | ConfigDict):
        kind = type(config).__name__
        raise UserError(f"--config={reference}: get_config() returns {kind}; return an ml_collections.ConfigDict")
    if "base" in config:
        start = f"start from jepa_jax.configs.{config['base']}.get_config() instead"
        raise UserError(f"--config={reference}: base = {config['base']!r} is no longer read; {start}")
    result = chosen(config, {})
    if "reference_batch" not in config.get("optim", {}):  # the rate of a recipe is meant for the batch of the recipe
        result.optim.reference_batch = result.optim.reference_batch
    return result


def statistics_problems(config: ConfigDict, given: Mapping[str, Any]) -> list[str]:
    """Returns what is wrong if `given` keys are statistics that those of the data set would replace."""
    if config.data.statistics != "set":
        return []
    fix = "leave it out, or set data.statistics = config and give both"
    return [
        f"config.{name} = {given[name]}: data.statistics = set takes mean and std from the data; {fix}"
        for name in STATISTICS
        if name in given
    ][:1]


def read_ladder(reference: str) -> list[LadderStep]:
    ladder = _from_file(reference, lambda module: getattr(module, "LADDER", ()))
    try:
        return [_ladder_step(*step) for step in ladder]
    except (TypeError, ValueError) as error:
        raise UserError(f"--config={reference}: LADDER ({error}); write {LADDER_FORM}") from error


def _ladder_step(name: str, changes: Mapping[str, Any], claimed: Any = ()) -> LadderStep:
    figures = claimed if isinstance(claimed, tuple | list) else (claimed,)
    return LadderStep(str(name), dict(changes), tuple(float(figure) for figure in figures))


def _from_file(reference: str, read: Callable[[ModuleType], T]) -> T:
    path = recipe_path(split_argument(reference)[0])
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
