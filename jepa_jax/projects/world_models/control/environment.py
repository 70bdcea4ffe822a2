"""The contract of an environment: pure functions of (state, action, key), which planners and episodes vectorise.

A state is any tree of arrays of one world, without a leading axis. A goal is a state too: the world as it should be, of
which the planner sees a picture.
"""

from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from jaxtyping import Array, Float, UInt8

from jepa_jax.base.classes import ClassTable, find_class
from jepa_jax.config.groups import DataConfig

State = Any
ENVIRONMENTS = ClassTable(
    "ENVIRONMENTS", {"two_rooms": "jepa_jax.projects.world_models.control.two_rooms:TwoRoomsEnvironment"}
)


class Environment(Protocol):
    """A world to act in; made of the `data` group of a config and of the numbers of the groups of a split.

    Groups are what a source declares as such, e.g. layouts: tasks of a split are of its groups alone. None if a source
    has no groups.

    Attributes:
      action_width: numbers of an action.
      longest_action: largest Euclidean norm of an action; planners shorten longer ones.
      steps: actions of an episode.
      success_distance: an episode whose last state is nearer than this to the goal is a success.
    """

    action_width: int
    longest_action: float
    steps: int
    success_distance: float

    def __init__(self, data: DataConfig, groups: np.ndarray | None): ...

    def task(self, key: jax.Array) -> tuple[State, State]:
        """Returns a start and a goal."""
        ...

    def step(self, state: State, action: Float[Array, " a"], key: jax.Array) -> State:
        """Returns the state after an action."""
        ...

    def frame(self, state: State) -> UInt8[Array, "h w c"]:
        """Returns what is seen of a state."""
        ...

    def distance(self, state: State, goal: State) -> Float[Array, ""]:
        """Returns how far a state is from a goal."""
        ...


@runtime_checkable
class Charted(Protocol):
    """An environment whose states have a position, so that paths can be measured and drawn.

    Attributes:
      bounds: least and greatest coordinate of a position, in both directions.
      extent: coordinates of the first and the last pixel of a frame, in both directions.
    """

    bounds: tuple[float, float]
    extent: tuple[float, float]

    def position(self, state: State) -> Float[Array, " 2"]:
        """Returns where a state is."""
        ...

    def moved(self, state: State, position: Float[Array, " 2"]) -> State:
        """Returns the same world with another position."""
        ...

    def straight(self, state: State, goal: State) -> Float[Array, " a"]:
        """Returns the action that leads straight to a goal, whatever is in between."""
        ...

    def shortest_path(self, start: State, goal: State) -> Float[Array, ""]:
        """Returns the length of the shortest way."""
        ...


def make_environment(name: str, data: DataConfig, groups: np.ndarray | None = None) -> Environment:
    """Returns the environment of a name, or of "package.module:Class"."""
    return find_class("method.control.environment", name, ENVIRONMENTS)(data, groups)


def vectorised(environment: Environment, name: str) -> Any:
    """Returns a function of an environment for many worlds at once: all arguments with a leading axis."""
    return jax.vmap(getattr(environment, name))
