"""Tables that say where each tensor of a public checkpoint belongs in a model of ours.

A family is one table of rules. Its names are templates in which `{i}` stands for a number, so that a table reads both
ways: a tensor that the model needs and the file lacks is reported by the name that the file should have.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jepa_jax.base.errors import UserError

Transform = Callable[[np.ndarray], np.ndarray]


def unchanged(tensor: np.ndarray) -> np.ndarray:
    return tensor


def dense(tensor: np.ndarray) -> np.ndarray:
    """Returns the kernel [in, out] of a PyTorch linear layer [out, in], or of a 1x1 convolution [out, in, 1, 1]."""
    return tensor.reshape(tensor.shape[:2]).T


def convolution(tensor: np.ndarray) -> np.ndarray:
    """Returns the kernel [h, w, in, out] of a PyTorch convolution [out, in, h, w]."""
    return tensor.transpose(2, 3, 1, 0)


class Rule(NamedTuple):
    """Says where a tensor goes. Rules with the same target are joined along the last axis, in the order of the table.

    Attributes:
        source: template of the name in the file.
        target: template of the path in the model, or None for a tensor that the model does not need.
        transform: turns the tensor into our layout.
    """

    source: str
    target: str | None
    transform: Transform = unchanged


Table = Sequence[Rule]


def both(source: str, target: str, transform: Transform) -> list[Rule]:
    """Returns the rules of a layer with weight and bias."""
    return [Rule(f"{source}.weight", f"{target}.kernel", transform), Rule(f"{source}.bias", f"{target}.bias")]


def norm(source: str, target: str) -> list[Rule]:
    """Returns the rules of a layer norm, or of the trained part of a batch norm."""
    return [Rule(f"{source}.weight", f"{target}.scale"), Rule(f"{source}.bias", f"{target}.bias")]


def batch_norm(source: str, target: str) -> list[Rule]:
    """Returns the rules of a batch norm with its running statistics."""
    return [
        *norm(source, target),
        Rule(f"{source}.running_mean", f"{target}.mean"),
        Rule(f"{source}.running_var", f"{target}.var"),
        Rule(f"{source}.num_batches_tracked", None),
    ]


def load_into(model: nnx.Module, tensors: Mapping[str, np.ndarray], table: Table, origin: object) -> None:
    """Replaces all parameters and batch statistics of a model by the tensors of a file.

    Args:
        model: what is changed, in place; nothing is changed if an error is raised.
        tensors: the content of the file by name.
        table: the names of the family.
        origin: the file, for errors.

    Raises:
        UserError: names every tensor that is missing, left over, or of a shape that does not fit.
    """
    problems: list[str] = []
    used: set[str] = set()
    loaded = []
    for path, variable in nnx.to_flat_state(nnx.state(model, (nnx.Param, nnx.BatchStat))):
        names = dict(_sources(".".join(map(str, path)), table))
        used |= names.keys()
        absent = [name for name in names if name not in tensors]
        problems += [f"{name} is missing" for name in absent]
        if not absent:
            value = _joined(names, tensors)
            if value is not None and value.shape == variable.shape:
                loaded.append((path, variable.replace(jnp.asarray(value, variable.dtype))))
            else:
                shapes = ", ".join(f"{name} has shape {list(tensors[name].shape)}" for name in names)
                problems.append(f"{shapes}: the model needs {list(variable.shape)} in its own layout")
    problems += [f"{name} is left over" for name in tensors if name not in used and not _is_unneeded(name, table)]
    if problems:
        listed = "\n  ".join(sorted(problems))
        fix = "use the weights that belong to its config.json"
        raise UserError(f"{origin}: the weights do not fit the model; {fix}\n  {listed}")
    nnx.update(model, nnx.from_flat_state(loaded))


def _joined(names: Mapping[str, Transform], tensors: Mapping[str, np.ndarray]) -> np.ndarray | None:
    """Returns one array made of the named tensors, or None if their numbers of axes do not fit."""
    try:
        return np.concatenate([transform(tensors[name]) for name, transform in names.items()], axis=-1)
    except ValueError:
        return None


def _sources(target: str, table: Table) -> Iterator[tuple[str, Transform]]:
    """Yields the tensors of the file that make up one array of the model."""
    found = False
    for rule in table:
        match = _pattern(rule.target).fullmatch(target) if rule.target else None
        if match:
            found = True
            yield rule.source.format(**match.groupdict()), rule.transform
    if not found:
        raise LookupError(f"the table of names has no rule for {target}")


def _is_unneeded(name: str, table: Table) -> bool:
    return any(rule.target is None and _pattern(rule.source).fullmatch(name) for rule in table)


def _pattern(template: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"\\{(\w+)\\}", r"(?P<\1>\\d+)", re.escape(template)))
