"""Finds parameters that training cannot change, before the first step and without running one."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
from jax.custom_derivatives import SymbolicZero

from jepa_jax.base.text import first_of
from jepa_jax.methods.contract import ParamGroup
from jepa_jax.program.optim import group_labels, path_of

if TYPE_CHECKING:
    from jepa_jax.program.build import Program

PyTree = Any
SHOWN = 5  # names per reason in a sentence


class DeadParameter(NamedTuple):
    """A parameter that training cannot change, and why."""

    path: str
    reason: str


def note_gradients(params: PyTree, reached: set[str]) -> PyTree:
    """Returns the parameters; when a gradient by them is traced, adds the paths that it reaches to `reached`.

    JAX omits the gradient of a parameter that the loss does not depend on. One that only happens to be zero, such as
    that of a bias before a batch norm, is computed, and its parameter counts as reached.
    """

    def note(path: Any, leaf: jax.Array) -> jax.Array:
        name = path_of(path)

        @jax.custom_vjp
        def identity(x: jax.Array) -> jax.Array:
            return x

        def backward(_: None, gradient: Any) -> tuple[Any]:
            if isinstance(gradient, SymbolicZero):
                return (None,)
            reached.add(name)
            return (gradient,)

        identity.defvjp(lambda x: (x.value, None), backward, symbolic_zeros=True)
        return identity(leaf)

    return jax.tree_util.tree_map_with_path(note, params)


def dead_parameters(program: "Program", batch: Mapping[str, jax.ShapeDtypeStruct]) -> list[DeadParameter]:
    """Returns the parameters of the model that no step changes, or that change without regard to the loss.

    This traces the step, and compilation finds the same trace in JAX's cache if `batch` is laid out like that of
    training (`data.pipeline.abstract_on`). The online probe is left out: a method need not feed it.
    """
    state, groups, dead = program.factory.abstract, program.method.param_groups, []
    program.train_step.trace(state, batch)
    for path, label in jax.tree_util.tree_flatten_with_path(group_labels(state.params["model"], groups))[0]:
        name, group = path_of(path), groups[int(label)] if label else ParamGroup("")
        if group.frozen_steps < 0 or group.frozen_steps >= program.length.total_steps:
            dead.append(DeadParameter(name, f"frozen by ParamGroup({group.pattern!r})"))
        elif group.lr == 0:
            dead.append(DeadParameter(name, "the optimizer leaves it out"))
        elif name not in program.reached:
            dead.append(DeadParameter(name, "the loss does not depend on it"))
    return dead


def in_words(dead: Sequence[DeadParameter]) -> str:
    """Returns one sentence about parameters that are not trained."""
    parts = []
    for reason in dict.fromkeys(one.reason for one in dead):
        paths = [one.path for one in dead if one.reason == reason]
        parts.append(f"{first_of(paths, SHOWN)} ({reason})")
    count = "1 parameter" if len(dead) == 1 else f"{len(dead)} parameters"
    return f"{count} will not be trained: {'; '.join(parts)}"
