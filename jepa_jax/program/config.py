"""Configs of runs: recipes, overrides and defaults made complete with the keys of the chosen method and encoder."""

from collections.abc import Mapping
from typing import Any

from jepa_jax.config.groups import Config
from jepa_jax.config.recipe import read_recipe
from jepa_jax.config.resolve import overlay, resolve
from jepa_jax.config.schema import flatten
from jepa_jax.methods.registry import method_config
from jepa_jax.models.registry import model_config

OWNERS = {"method": method_config, "model": model_config}


def load_config(reference: str, overrides: Mapping[str, Any] | None = None) -> Config:
    """Returns the config of a recipe with changes.

    Args:
      reference: the name of a shipped recipe, the path of a file, or `file.py:argument`.
      overrides: values by dotted key, e.g. {"optim.lr": 0.1}; texts are read as the type of their key.

    Raises:
      UserError: says everything that is wrong.
    """
    config = resolve(recipe_values(reference), OWNERS)
    return changed_config(config, overrides) if overrides else config


def recipe_values(reference: str) -> dict[str, Any]:
    """Returns what a recipe sets, with what the recipes it is based on set, by dotted key."""
    values = read_recipe(reference)
    base = values.pop("base", None)
    return overlay(recipe_values(base), flatten(values), OWNERS) if base else flatten(values)


def resolve_config(values: Mapping[str, Any], *, lenient: bool = False) -> Config:
    """Returns the config of nested or dotted values; `lenient` accepts the config.json of an earlier version."""
    return resolve(values, OWNERS, lenient=lenient)


def changed_config(config: Config, changes: Mapping[str, Any]) -> Config:
    """Returns a copy with other values by dotted key; a changed choice (a loss, an encoder) brings its defaults."""
    return resolve(overlay(flatten(config), flatten(changes), OWNERS), OWNERS)
