"""Methods by the name that `method.name` gives them."""

from jepa_jax.base.classes import find_class
from jepa_jax.config.groups import Config
from jepa_jax.config.owners import METHODS
from jepa_jax.methods.contract import Method


def build_method(config: Config, *, total_steps: int) -> Method:
    """Returns the method that `config.method.name` names; `total_steps` is the length of its schedules."""
    return find_class("method.name", config.method.name, METHODS)(config, total_steps)
