"""Evaluator of planning: success on held-out tasks beside baselines, with intervals, path lengths and times."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jepa_jax.data.contract import Grouped
from jepa_jax.evals.evaluators import EvaluationContext, Evaluator, Figures, Moment, Stage
from jepa_jax.program.step import TrainState, evaluated_variables
from jepa_jax.projects.world_models.control.environment import Charted
from jepa_jax.projects.world_models.control.episodes import (
    Controller,
    Episodes,
    model_controller,
    random_controller,
    straight_controller,
    true_controller,
)
from jepa_jax.projects.world_models.control.model import FrozenWorldModel
from jepa_jax.projects.world_models.control.trial import Trial
from jepa_jax.projects.world_models.evals.prediction import encoded, sequences
from jepa_jax.projects.world_models.evals.readout import read

TASK_STREAMS = {"test": 1, "validation": 2}
MAPPED = 3  # tasks whose energies are mapped
MAP_POINTS = 45  # per side of the map


class Control(Evaluator):
    """Success of a planner that sees frames alone, on tasks in the groups of the test split.

    The same tasks are given to baselines: random actions, straight lines, the same search on the true dynamics, the
    model before training, and the model that is shown the plans of other episodes. Tasks depend on `data.seed` alone.
    While a run trains, tasks are in the groups that `data.validation` holds out.
    """

    def __init__(self, context: EvaluationContext):
        super().__init__(context)
        self.config = context.config.method.control
        self.model = FrozenWorldModel(context.config, context.program, None, None)  # gets weights in `run`
        self._exhibits: Mapping[str, np.ndarray] = {}
        if context.validation is not None and self.config.validation_episodes:
            self.choosable = {"validation_success_rate": "max"}

    def due(self, moment: Moment) -> bool:
        if not self.config.environment:
            return False
        if moment.stage == Stage.EPOCH:
            return bool(self.choosable) and moment.is_test(self.context.config.eval)
        return moment.stage == Stage.FINAL or self.context.config.eval.untrained

    def run(self, state: TrainState, moment: Moment) -> Figures:
        weights = evaluated_variables(state, self.context.config.eval.weights)
        if moment.stage == Stage.EPOCH:
            return {
                "validation_success_rate": self._validation.success_rate(self._played(self._validation, weights)[0])
            }
        played, seconds = self._played(self._test, weights)
        rate = self._test.success_rate(played)
        if moment.stage == Stage.UNTRAINED:
            return {"untrained_success_rate": rate}
        figures: Figures = {
            "success_rate": rate,
            "success_interval": self._test.interval(rate),
            "episodes": len(self._test),
            "shuffled_success_rate": self._test.success_rate(self._played(self._test, weights, shuffled=True)[0]),
            "seconds_per_plan": seconds / int(np.prod(played.plans.shape[:2])),
        }
        figures |= {f"{name}_success_rate": self._test.success_rate(one) for name, one in self._baselines.items()}
        if isinstance(self._test.environment, Charted):
            figures |= {f"{name}detour": self._test.detour(one) for name, one in self._with_paths(played).items()}
            self._exhibits = self._charts(played, weights)
        return figures

    def exhibits(self) -> Mapping[str, np.ndarray]:
        """Returns paths, plans and tasks of all test episodes, and maps of energies."""
        return self._exhibits

    def in_words(self, figures: Figures) -> str:
        if "success_rate" not in figures:
            return "  ".join(f"{name.replace('_', ' ')} {value:.1f} %" for name, value in figures.items())
        low, high = figures["success_interval"]
        others = ", ".join(
            f"{name} {figures[f'{name}_success_rate']:.1f}"
            for name in ("random", "straight", "true_dynamics", "shuffled")
            if f"{name}_success_rate" in figures
        )
        return f"success {figures['success_rate']:.1f} % ({low:.1f} to {high:.1f}; {others})"

    def _played(self, trial: Trial, weights: Any, *, shuffled: bool = False) -> tuple[Episodes, float]:
        name = "model, plans of others" if shuffled else "model"
        self.context.progress.start(f"{len(trial)} episodes, {name}", 1)

        def make(params: Any, stats: Any) -> Controller:
            return model_controller(trial.environment, self.config, self.model.bound(params, stats), shuffled=shuffled)

        played = trial.play(name, make, *weights)
        self.context.progress.advance(1)
        return played

    @functools.cached_property
    def _baselines(self) -> dict[str, Episodes]:
        """Episodes of what does not depend on the model."""
        trial = self._test
        controllers = {
            "random": lambda: random_controller(trial.environment),
            "true_dynamics": lambda: true_controller(trial.environment, self.config),
        }
        if isinstance(trial.environment, Charted):
            controllers["straight"] = lambda: straight_controller(trial.environment)
        self.context.progress.start(f"{len(trial)} episodes, baselines", len(controllers))
        played = {}
        for name, make in controllers.items():
            played[name] = trial.play(name, make)[0]
            self.context.progress.advance(1)
        return played

    def _with_paths(self, played: Episodes) -> dict[str, Episodes]:
        return {"": played, "true_dynamics_": self._baselines["true_dynamics"]}

    @functools.cached_property
    def _test(self) -> Trial:
        return self._trial("test", self.config.episodes)

    @functools.cached_property
    def _validation(self) -> Trial:
        return self._trial("validation", self.config.validation_episodes)

    def _trial(self, split: str, episodes: int) -> Trial:
        source = getattr(self.context, split)
        groups = source.groups if isinstance(source, Grouped) else None
        return Trial.of(self.context.config, groups, episodes, TASK_STREAMS[split])

    def _charts(self, played: Episodes, weights: Any) -> dict[str, np.ndarray]:
        """Returns what the report draws.

        Of all episodes: `paths` [E, T + 1, 2], `goals` [E, 2], `successes` [E], `shortest` [E], `frames` [E, H, W, C]
        of the starts. If positions can be read from latents: `planned` [E, H, 2], where the first plan is predicted to
        lead. Of the first tasks: `energies` [n, MAP_POINTS, MAP_POINTS] by row (y) and column (x), the squared distance
        of the latent of each position to that of the goal.
        """
        trial, environment = self._test, self._test.environment
        starts, goals = trial.tasks
        model, frame = self.model.with_weights(*weights), jax.jit(jax.vmap(environment.frame))
        charts = {
            "paths": trial.paths(played).astype(np.float32),
            "goals": np.asarray(jax.vmap(environment.position)(goals)),
            "successes": trial.successes(played),
            "shortest": trial.shortest_paths(),
            "frames": np.asarray(frame(starts)),
            "extent": np.array(environment.extent),
            "bounds": np.array(environment.bounds),
        }
        mapped = (jax.tree.map(lambda leaf, task=task: leaf[task], goals) for task in range(min(MAPPED, len(trial))))
        charts["energies"] = np.stack([self._energies(model, goal, frame) for goal in mapped])
        if self.context.train.spec.get("states", charts["goals"][0]).shape[-1] == 2:
            train = sequences(self.context.train)
            states = train["states"].reshape(-1, 2)
            latents = model.rollout(model.encode(charts["frames"]), np.asarray(played.plans[:, 0]))
            known = encoded(model, train["frames"]).reshape(len(states), -1)
            charts["planned"] = read(known, states, latents)[0].astype(np.float32)
        return charts

    def _energies(self, model: FrozenWorldModel, goal: Any, frame: Any) -> np.ndarray:
        """Returns the energy of each position of a goal's world, [MAP_POINTS, MAP_POINTS]."""
        environment = self._test.environment
        least, greatest = environment.bounds
        axis = jnp.linspace(least, greatest, MAP_POINTS)
        grid = jnp.stack(jnp.meshgrid(axis, axis), -1).reshape(-1, 2)
        latents = model.encode(np.asarray(frame(jax.vmap(environment.moved, (None, 0))(goal, grid))))
        aim = model.encode(np.asarray(environment.frame(goal))[None])
        return np.mean(np.square(latents - aim), axis=-1).reshape(MAP_POINTS, MAP_POINTS)
