"""Finds parameters that training cannot change, before the first step and without running one.

The traced step names its gradients and updates. One pass over its jaxpr tells which of them are zero whatever the
inputs are: those of a parameter that the loss does not depend on, or that the optimizer leaves out. A gradient that
only happens to be zero, such as that of a bias before a batch norm, is none of them.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core

from jepa_jax.compiled.flops import inner_jaxprs
from jepa_jax.methods.contract import ParamGroup
from jepa_jax.program.optim import group_labels, path_of

PyTree = Any
GRADIENT, UPDATE = "gradient of ", "update of "
SHOWN = 5  # names per reason in a sentence
# Results are zero if all inputs are.
LINEAR = frozenset((
    "abs", "add", "add_any", "broadcast_in_dim", "concatenate", "convert_element_type", "copy", "copy_p", "cumsum",
    "device_put", "expand_dims", "mul", "name", "neg", "optimization_barrier", "pad", "pvary", "real", "reduce_max",
    "reduce_min", "reduce_precision", "reduce_sum", "reduce_window_sum", "reshape", "rev", "select_and_gather_add",
    "sharding_constraint", "sign", "slice", "split", "sqrt", "square", "squeeze", "stop_gradient", "sub", "transpose",
))  # fmt: skip
PRODUCTS = frozenset(("mul", "dot_general", "conv_general_dilated"))  # zero if any input is
FIRST = frozenset(("div", "dynamic_slice", "gather"))  # zero if the first input is
FIRST_AND_THIRD = frozenset(("scatter-add", "scatter_add", "scatter"))  # the second one has the indices


class DeadParameter(NamedTuple):
    """A parameter that training cannot change, and why."""

    path: str
    reason: str


def named(kind: str, tree: PyTree) -> PyTree:
    """Returns a tree of gradients or updates whose leaves have names in the jaxpr; computes nothing."""
    return jax.tree_util.tree_map_with_path(lambda path, leaf: checkpoint_name(leaf, kind + path_of(path)), tree)


def dead_parameters(program: Any, batch: Mapping[str, jax.ShapeDtypeStruct]) -> list[DeadParameter]:
    """Returns the parameters of the model that no step changes, or that change without regard to the loss.

    Tracing takes as long as that before compilation, which finds the same trace in jax's cache if the `batch` is laid
    out like that of training (`data.contract.abstract_on`). The online probe is left out: a method need not feed it.
    """
    state, total_steps = program.factory.abstract, program.length.total_steps
    params = state.params["model"]
    traced = program.useful_step.trace(state, batch).jaxpr.jaxpr
    zeros: dict[str, bool] = {}
    zero_results(traced, [False] * len(traced.invars), zeros)
    frozen, dead = frozen_parameters(params, program.method.param_groups, total_steps), []
    for path in (path_of(path) for path, _ in jax.tree_util.tree_flatten_with_path(params)[0]):
        if path in frozen:
            dead.append(DeadParameter(path, frozen[path]))
        elif zeros[UPDATE + path]:
            dead.append(DeadParameter(path, "the optimizer leaves it out"))
        elif zeros[GRADIENT + path]:
            dead.append(DeadParameter(path, "the loss does not depend on it"))
    return dead


def frozen_parameters(params: PyTree, groups: Sequence[ParamGroup], total_steps: int) -> dict[str, str]:
    """Returns the paths of parameters that stay frozen in all steps, with the group that says so."""
    if not groups:
        return {}
    frozen = {}
    for path, label in jax.tree_util.tree_flatten_with_path(group_labels(params, groups))[0]:
        group = groups[int(label)] if label else None
        if group and (group.frozen_steps < 0 or group.frozen_steps >= total_steps):
            frozen[path_of(path)] = f"frozen by ParamGroup({group.pattern!r})"
    return frozen


def in_words(dead: Sequence[DeadParameter]) -> str:
    """Returns one sentence about parameters that are not trained."""
    parts = []
    for reason in dict.fromkeys(one.reason for one in dead):
        paths = [one.path for one in dead if one.reason == reason]
        more = f" and {len(paths) - SHOWN} more" if len(paths) > SHOWN else ""
        parts.append(f"{', '.join(paths[:SHOWN])}{more} ({reason})")
    count = "1 parameter" if len(dead) == 1 else f"{len(dead)} parameters"
    return f"{count} will not be trained: {'; '.join(parts)}"


def zero_results(jaxpr: core.Jaxpr, zero_inputs: Sequence[bool], names: dict[str, bool]) -> list[bool]:
    """Returns which results of a jaxpr are certainly zero if the inputs marked so are; notes that of named values."""
    zero = {v for v, is_zero in zip(jaxpr.invars, zero_inputs, strict=True) if is_zero}

    def is_zero(atom: Any) -> bool:
        return not np.any(atom.val) if isinstance(atom, core.Literal) else atom in zero

    for equation in jaxpr.eqns:
        inputs = [is_zero(atom) for atom in equation.invars]
        if equation.primitive.name == "name":
            names[equation.params["name"]] = inputs[0]
        zero.update(v for v, flag in zip(equation.outvars, _zero_outputs(equation, inputs, names), strict=True) if flag)
    return [is_zero(atom) for atom in jaxpr.outvars]


def _zero_outputs(equation: Any, inputs: list[bool], names: dict[str, bool]) -> list[bool]:
    """Returns which outputs of an equation are certainly zero; what is not known here is not."""
    name, outputs = equation.primitive.name, len(equation.outvars)
    inner = inner_jaxprs(equation.params)
    if name == "scan":
        return _zero_outputs_of_scan(equation.params, inner[0], inputs, names)
    if name == "cond":
        branches = [zero_results(branch, inputs[1:], names) for branch in inner]
        return [all(flags) for flags in zip(*branches, strict=True)]
    if name != "while" and inner and len(inner[0].invars) == len(inputs) and len(inner[0].outvars) == outputs:
        return zero_results(inner[0], inputs, names)  # a call
    zero = (
        (name in LINEAR and all(inputs))
        or (name in PRODUCTS and any(inputs))
        or (name in FIRST and inputs[0])
        or (name in FIRST_AND_THIRD and inputs[0] and inputs[2])
        or (name == "dynamic_update_slice" and all(inputs[:2]))
        or (name == "select_n" and all(inputs[1:]))
    )
    return [zero] * outputs


def _zero_outputs_of_scan(
    params: Mapping[str, Any], body: core.Jaxpr, inputs: list[bool], names: dict[str, bool]
) -> list[bool]:
    constants, carried = params["num_consts"], params["num_carry"]
    carry = inputs[constants : constants + carried]
    while True:  # until what is carried stays zero
        outputs = zero_results(body, [*inputs[:constants], *carry, *inputs[constants + carried :]], names)
        kept = [before and after for before, after in zip(carry, outputs[:carried], strict=True)]
        if kept == carry:
            return [*carry, *outputs[carried:]]
        carry = kept
