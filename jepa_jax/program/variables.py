"""Nested variables of a model: some come from elsewhere, some are drawn anew, some are not trained."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

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


def random_variables(shapes: nnx.State, key: jax.Array) -> PyTree:
    """Returns keys folded from `key`, one per random stream, and counters at zero."""
    leaves, structure = jax.tree.flatten(shapes)
    fresh = []
    for i, leaf in enumerate(leaves):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            own = jax.random.fold_in(key, i)
            fresh.append(jax.random.split(own, leaf.shape) if leaf.shape else own)
        else:
            fresh.append(jnp.zeros(leaf.shape, leaf.dtype))
    return jax.tree.unflatten(structure, fresh)


def variables_of(model: Any) -> PyTree:
    """Returns the variables of a model that are neither trained nor random state."""
    return nnx.to_pure_dict(nnx.state(model, nnx.All(nnx.Not(nnx.Param), nnx.Not(nnx.RngState))))
