"""Configs of runs: recipes with overrides, checked, and with the statistics of their data."""

from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from jepa_jax.base.errors import UserError
from jepa_jax.base.files import user_path
from jepa_jax.config.config_dicts import overridden
from jepa_jax.config.groups import Config
from jepa_jax.config.owners import dropped_keys
from jepa_jax.config.recipe import STATISTICS, read_recipe, statistics_problems
from jepa_jax.config.resolve import resolve
from jepa_jax.config.schema import flatten
from jepa_jax.data.contract import Synthetic
from jepa_jax.data.sources import find_opener
from jepa_jax.data.statistics import Statistics, set_statistics


def load_config(reference: str | Mapping[str, Any] | ConfigDict, overrides: Mapping[str, Any] | None = None) -> Config:
    """Returns the checked config of a recipe with changes; opens no data.

    With `data.statistics = set`, mean and std are those of middle grey until `with_set_statistics` replaces them.

    Args:
      reference: what `read_recipe` takes, or a config as nested values.
      overrides: values by dotted key, e.g. {"optim.lr": 0.1}; texts are read as the type of their key.
    """
    given = flatten(overrides or {})
    config, refused = overridden(read_recipe(reference) if isinstance(reference, str) else reference, given)
    refused += statistics_problems(config, given)
    resolved = resolve(config, refused=refused)
    return grey_statistics(resolved) if resolved.data.statistics == "set" else resolved


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
    """Returns the config with mean and standard deviation of its data set, if `data.statistics` is "set"."""
    if config.data.statistics != "set":
        return config
    if user_path(config.data.dir, "config.data.dir").exists():
        return _with_statistics(config, set_statistics(config.data))
    if needs_data:
        raise UserError(
            f"config.data.dir = {config.data.dir!r}: no such file or folder, and data.statistics = set needs the data; "
            "give its place"
        )
    return config


def _with_statistics(config: Config, known: Statistics) -> Config:
    return changed_config(config, dict(zip(STATISTICS, (known.mean, known.std), strict=True)))


def changed_config(config: Config, changes: Mapping[str, Any]) -> Config:
    """Returns a copy with other values by dotted key; a changed choice (a loss, an encoder) brings its defaults."""
    given, changed = flatten(config), flatten(changes)
    dropped = dropped_keys(given, changed)
    return resolve({name: value for name, value in given.items() if name not in dropped} | changed)
