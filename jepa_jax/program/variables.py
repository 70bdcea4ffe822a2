"""Nested variables of a model of which some come from elsewhere."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jepa_jax.base.errors import UserError

PyTree = Any


def with_variables(old: PyTree, new: PyTree) -> PyTree:
    """Returns nested variables in which those of `new` replace their counterparts."""
    if not isinstance(new, Mapping):
        return new
    return {name: with_variables(value, new[name]) if name in new else value for name, value in old.items()}


def check_variables(new: PyTree, own: PyTree, path: str) -> None:
    """Raises UserError if a variable of `new` has no counterpart in `own`, or one of another shape."""
    if isinstance(new, Mapping) and isinstance(own, Mapping):
        for name, value in new.items():
            if name not in own:
                known = ", ".join(map(str, own)) or "nothing"
                raise UserError(f"{path}/{name}: the model has no such variable; in this place it has {known}")
            check_variables(value, own[name], f"{path}/{name}")
        return
    shapes = ["several variables" if isinstance(part, Mapping) else np.shape(part) for part in (new, own)]
    if shapes[0] != shapes[1]:
        raise UserError(f"{path}: is {shapes[0]} and the model has {shapes[1]}; load what fits the config, or adapt it")
