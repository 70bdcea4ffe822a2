"""Trials: the same tasks for every controller, and what became of them."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jepa_jax.base.statistics import accuracy_interval
from jepa_jax.config.groups import Config
from jepa_jax.projects.world_models.control.environment import State, make_environment
from jepa_jax.projects.world_models.control.episodes import Controller, Episodes, run_episodes


@dataclasses.dataclass(frozen=True)
class Trial:
    """Tasks in an environment: starts and goals [E, ...]; its programs are compiled once."""

    environment: Any  # Environment, which may be Charted
    config: Any  # ControlConfig
    tasks: tuple[State, State]
    key: jax.Array
    compiled: dict[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, config: Config, groups: np.ndarray | None, episodes: int, stream: int) -> "Trial":
        """Returns a trial of some tasks, which depend on (data.seed, stream) and the groups alone."""
        control = config.method.control
        environment = make_environment(control.environment, config.data, groups)
        of_tasks, key = jax.random.split(jax.random.fold_in(jax.random.key(config.data.seed), stream))
        tasks = jax.jit(jax.vmap(environment.task))(jax.random.split(of_tasks, episodes))
        return cls(environment, control, tasks, key)

    def __len__(self) -> int:
        return len(jax.tree.leaves(self.tasks)[0])

    def play(self, name: str, make: Callable[..., Controller], *weights: Any) -> tuple[Episodes, float]:
        """Returns the episodes of a controller, as arrays of numpy, and how many seconds they took.

        Args:
          name: under which the compiled program is kept for other weights.
          make: makes the controller of `weights`.
        """

        def episodes(tasks: tuple[State, State], key: jax.Array, *weights: Any) -> Episodes:
            return run_episodes(
                self.environment, make(*weights), tasks, key,
                horizon=self.config.horizon, executed=self.config.executed,
            )  # fmt: skip

        arguments = (self.tasks, self.key, *weights)
        if name not in self.compiled:
            self.compiled[name] = jax.jit(episodes).lower(*arguments).compile()
        begun = time.perf_counter()
        played = jax.block_until_ready(self.compiled[name](*arguments))
        return jax.device_get(played), time.perf_counter() - begun

    def distances(self, played: Episodes) -> np.ndarray:
        """Returns the distance of each state to its goal, [E, T + 1]."""
        each = jax.vmap(jax.vmap(self.environment.distance, (0, None)))
        return np.asarray(jax.jit(each)(played.states, self.tasks[1]))

    def successes(self, played: Episodes) -> np.ndarray:
        """Returns which episodes end near enough to their goals, [E]."""
        return self.distances(played)[:, -1] < self.environment.success_distance

    def success_rate(self, played: Episodes) -> float:
        """Returns the share of successes in percent."""
        return 100 * float(np.mean(self.successes(played)))

    def interval(self, rate: float) -> list[float]:
        """Returns Wilson's 95 % interval of a success rate, in percent."""
        return list(accuracy_interval(rate, len(self)))

    def paths(self, played: Episodes) -> np.ndarray:
        """Returns the positions [E, T + 1, 2] of an environment that is `Charted`."""
        return np.asarray(jax.vmap(jax.vmap(self.environment.position))(played.states))

    def shortest_paths(self) -> np.ndarray:
        """Returns the length of the shortest way of each task, [E], of an environment that is `Charted`."""
        return np.asarray(jax.vmap(self.environment.shortest_path)(*self.tasks))

    def detour(self, played: Episodes) -> float | None:
        """Returns how much longer than the shortest ones the ways of successes are: the median of the ratios.

        A way is counted until it first comes near enough to the goal, with the rest of it as a straight line.
        """
        distances, paths = self.distances(played), self.paths(played)
        arrived = distances < self.environment.success_distance
        first = np.argmax(arrived, axis=1)
        walked = np.cumsum(np.linalg.norm(np.diff(paths, axis=1), axis=-1), axis=1)
        walked = np.pad(walked, ((0, 0), (1, 0)))
        rows = np.arange(len(paths))
        ratios = (walked[rows, first] + distances[rows, first]) / self.shortest_paths()
        chosen = ratios[self.successes(played)]
        return float(np.median(chosen)) if len(chosen) else None
