"""Configs of runs: recipes, overrides and defaults made complete with the keys of the chosen method and encoder."""

import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from jepa_jax.base.errors import UserError
from jepa_jax.config.groups import Config
from jepa_jax.config.recipe import read_recipe, recipe_path
from jepa_jax.config.resolve import overlay, resolve
from jepa_jax.config.schema import Problem, flatten
from jepa_jax.data.contract import Synthetic
from jepa_jax.data.sources import find_opener
from jepa_jax.data.statistics import Statistics, set_statistics
from jepa_jax.methods.registry import build_method, method_config
from jepa_jax.models.registry import model_config

FIXED_STATISTICS = ("data.augment.mean", "data.augment.std")
OWNERS = {"method": method_config, "model": model_config}


def weights_problem(config: Config) -> Iterator[Problem]:
    """Yields a problem if evaluations are to read a copy of the encoder that the method does not keep."""
    if config.eval.weights == "target":
        ema = build_method(config, total_steps=1).ema
        if ema is None or "encoder" not in ema.modules:
            yield Problem("eval.weights", "this method keeps no copy of its encoder; use online")


def load_config(reference: str, overrides: Mapping[str, Any] | None = None) -> Config:
    """Returns the config of a recipe with changes; opens no data.

    With `data.statistics = set`, mean and std are those of middle grey until `with_set_statistics` replaces them.

    Args:
      reference: the name of a shipped recipe, the path of a file, or `file.py:argument`.
      overrides: values by dotted key, e.g. {"optim.lr": 0.1}; texts are read as the type of their key.

    Raises:
      UserError: says everything that is wrong.
    """
    values = recipe_values(reference)
    config = resolve_config(values)
    if overrides:
        # The rate of a recipe is meant for the batch of the recipe, also if another batch is chosen.
        values = {**values, "optim.reference_batch": config.optim.reference_batch}
        values = overlay(values, flatten(overrides), OWNERS)
        check_statistics(flatten(overrides), values)
        config = resolve_config(values)
    return grey_statistics(config) if config.data.statistics == "set" else config


def check_statistics(given: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Raises UserError if a recipe or a command line gives statistics that those of the set would replace.

    Args:
      given: what the recipe or the command line sets itself, by dotted key.
      values: the same with everything below it.
    """
    replaced = [key for key in FIXED_STATISTICS if key in given]
    if replaced and values.get("data.statistics") == "set":
        raise UserError(
            f"config.{replaced[0]} = {given[replaced[0]]}: data.statistics = set takes mean and std from the data; "
            "leave it out, or set data.statistics = config and give both"
        )


def grey_statistics(config: Config) -> Config:
    """Returns the config with mean and standard deviation of middle grey; refuses data without files."""
    data, channels = config.data, config.data.channels
    opener = find_opener(data)
    if isinstance(opener, Synthetic) and opener.synthetic:
        raise UserError(f"config.data.statistics = set: {data.source} has no files to compute them of; use config")
    if not data.dir:
        raise UserError("config.data.dir = '': data.statistics = set needs the data; give its place, or use config")
    return _with_statistics(config, Statistics((0.5,) * channels, (0.25,) * channels, 0))


def with_set_statistics(config: Config, *, needs_data: bool) -> Config:
    """Returns the config with mean and standard deviation of its data set, if `data.statistics` is "set".

    Args:
      needs_data: raises UserError if the set is not there, as training must; a plan can do without.
    """
    if config.data.statistics != "set":
        return config
    if pathlib.Path(config.data.dir).expanduser().exists():
        return _with_statistics(config, set_statistics(config.data))
    if needs_data:
        raise UserError(
            f"config.data.dir = {config.data.dir!r}: no such file or folder, and data.statistics = set needs the data; "
            "give its place"
        )
    return config


def _with_statistics(config: Config, known: Statistics) -> Config:
    return changed_config(config, dict(zip(FIXED_STATISTICS, (known.mean, known.std), strict=True)))


def recipe_values(reference: str, above: tuple[str, ...] = ()) -> dict[str, Any]:
    """Returns what a recipe sets, with what the recipes it is based on set, by dotted key."""
    if reference in above:
        raise UserError(f"--config={above[0]}: {reference} is based on itself; change its base")
    values = read_recipe(reference)
    base = values.pop("base", None)
    if base is None:
        check_statistics(flatten(values), flatten(values))
        return flatten(values)
    beside = recipe_path(reference.partition(".py:")[0] + ".py" * (".py:" in reference)).with_name(base)
    inherited = recipe_values(str(beside) if beside.is_file() else base, (*above, reference))
    combined = overlay(inherited, flatten(values), OWNERS)
    check_statistics(flatten(values), combined)
    return combined


def resolve_config(values: Mapping[str, Any], *, lenient: bool = False) -> Config:
    """Returns the config of nested or dotted values; `lenient` accepts the config.json of an earlier version."""
    return resolve(values, OWNERS, lenient=lenient, more_problems=weights_problem)


def changed_config(config: Config, changes: Mapping[str, Any]) -> Config:
    """Returns a copy with other values by dotted key; a changed choice (a loss, an encoder) brings its defaults."""
    return resolve_config(overlay(flatten(config), flatten(changes), OWNERS))
