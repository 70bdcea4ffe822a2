"""Tables that say where each tensor of a public checkpoint belongs in a model of ours.

A family is one table of rules. Its names are templates in which `{i}` stands for a number, so that a table reads both
ways: a tensor that the model needs and the file lacks is reported by the name that the file should have.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jepa_jax.base.errors import UserError


class Layout(NamedTuple):
    """How a tensor lies in a file and in a model: `load` turns the one of the file into that of the model."""

    load: Callable[[np.ndarray], np.ndarray]
    save: Callable[[np.ndarray], np.ndarray]  # the other way round


unchanged = Layout(np.asarray, np.asarray)
# The kernel [in, out] of a PyTorch linear layer [out, in], or of a 1x1 convolution [out, in, 1, 1].
dense = Layout(lambda tensor: tensor.reshape(tensor.shape[:2]).T, np.transpose)
# The kernel [h, w, in, out] of a PyTorch convolution [out, in, h, w].
convolution = Layout(lambda tensor: tensor.transpose(2, 3, 1, 0), lambda kernel: kernel.transpose(3, 2, 0, 1))


def patches(size: int) -> Layout:
    """Returns the layout of the convolution [out, in, size, size] that embeds patches; our kernel has their numbers."""

    def save(kernel: np.ndarray) -> np.ndarray:
        return convolution.save(kernel.reshape(size, size, -1, kernel.shape[-1]))

    return Layout(lambda tensor: convolution.load(tensor).reshape(-1, tensor.shape[0]), save)


class Rule(NamedTuple):
    """Says where a tensor goes; tensors with the same target are joined along the last axis, in the table's order."""

    source: str  # template of the name in the file
    target: str | None  # template of the path in the model; None for a tensor that the model does not need
    layout: Layout = unchanged


Table = Sequence[Rule]


def both(source: str, target: str, layout: Layout) -> list[Rule]:
    """Returns the rules of a layer with weight and bias."""
    return [Rule(f"{source}.weight", f"{target}.kernel", layout), Rule(f"{source}.bias", f"{target}.bias")]


def unneeded(*sources: str) -> list[Rule]:
    """Returns the rules of tensors that the model does not need."""
    return [Rule(source, None) for source in sources]


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


def load_into(
    model: nnx.Module,
    tensors: Mapping[str, np.ndarray],
    table: Table | None,
    origin: object,
    fix: str = "use the weights that belong to its config.json",
) -> None:
    """Replaces the variables of a model, in place, by the tensors of a file.

    `table` holds the names of the family, for its parameters and batch statistics; None stands for the dotted paths of
    our own modules, with all variables but the state of random streams. Raises UserError with `origin`, `fix` and every
    tensor that is missing, left over, or of a shape that does not fit.
    """
    problems: list[str] = []
    used: set[str] = set()
    loaded = []
    for path, variable, names in _named_variables(model, table):
        used |= names.keys()
        absent = [name for name in names if name not in tensors]
        problems += [f"{name} is missing" for name in absent]
        if not absent:
            value = _joined(names, tensors)
            if value is not None and value.shape == variable.shape:
                loaded.append((path, variable.replace(jnp.asarray(value, variable.dtype))))
            else:
                shapes = ", ".join(f"{name} has shape {list(tensors[name].shape)}" for name in names)
                layout = " in its own layout" if table else ""
                problems.append(f"{shapes}: the model needs {list(variable.shape)}{layout}")
    unneeded_names = [_pattern(rule.source) for rule in table or () if rule.target is None]
    left_over = (name for name in tensors if name not in used)
    problems += [f"{name} is left over" for name in left_over if not any(p.fullmatch(name) for p in unneeded_names)]
    if problems:
        listed = "\n  ".join(sorted(problems))
        raise UserError(f"{origin}: the weights do not fit the model; {fix}\n  {listed}")
    nnx.update(model, nnx.from_flat_state(loaded))


def saved_tensors(model: nnx.Module, table: Table | None) -> dict[str, np.ndarray]:
    """Returns the variables of a model under the names and in the layout of a family; see `load_into`."""
    saved = {}
    for _, variable, names in _named_variables(model, table):
        value = np.asarray(variable[...])
        parts = np.split(value, len(names), axis=-1) if len(names) > 1 else [value]
        for (name, layout), part in zip(names.items(), parts, strict=True):
            saved[name] = np.asarray(layout.save(part), order="C")
    return saved


def _named_variables(model: nnx.Module, table: Table | None) -> Iterator[tuple[Any, Any, dict[str, Layout]]]:
    """Yields the path of each variable, the variable, and the tensors of the file that make it up."""
    kept = nnx.Not(nnx.RngState) if table is None else (nnx.Param, nnx.BatchStat)
    for path, variable in nnx.to_flat_state(nnx.state(model, kept)):
        dotted = ".".join(map(str, path))
        yield path, variable, {dotted: unchanged} if table is None else _sources(dotted, table)


def _joined(names: Mapping[str, Layout], tensors: Mapping[str, np.ndarray]) -> np.ndarray | None:
    """Returns one array made of the named tensors, or None if their numbers of axes do not fit."""
    try:
        parts = [layout.load(tensors[name]) for name, layout in names.items()]
        return np.concatenate(parts, axis=-1) if len(parts) > 1 else parts[0]
    except (ValueError, IndexError):
        return None


def _sources(target: str, table: Table) -> dict[str, Layout]:
    """Returns the tensors of the file that make up one array of the model."""
    matches = [(rule, _pattern(rule.target).fullmatch(target)) for rule in table if rule.target]
    found = {rule.source.format(**match.groupdict()): rule.layout for rule, match in matches if match}
    if not found:
        raise LookupError(f"the table of names has no rule for {target}")
    return found


def _pattern(template: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"\\{(\w+)\\}", r"(?P<\1>\\d+)", re.escape(template)))
