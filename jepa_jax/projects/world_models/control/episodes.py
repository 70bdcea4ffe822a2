"""Episodes: a controller in an environment, all of them in one compiled program."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jepa_jax.projects.world_models.control.energy import model_energy, time_weights, true_energy
from jepa_jax.projects.world_models.control.environment import Environment, State
from jepa_jax.projects.world_models.control.planners import continued, plan, shortened

Plans = Float[Array, "e h a"]
# (key, states, goals, last plans, actions left) -> plans
Controller = Callable[[jax.Array, State, State, Plans, jax.Array], Plans]


class Episodes(NamedTuple):
    """What happened: states of all times [E, T + 1, ...], and the plans that were made [E, P, H, A]."""

    states: State
    goals: State
    plans: Float[Array, "e p h a"]


def run_episodes(
    environment: Environment,
    control: Controller,
    tasks: tuple[State, State],
    key: jax.Array,
    *,
    horizon: int,
    executed: int,
) -> Episodes:
    """Returns the episodes of a controller; `executed` actions of a plan are done before the next one is made."""
    start, goals = tasks
    episodes = len(jax.tree.leaves(start)[0])
    step = jax.vmap(environment.step)

    def act(states: State, given: tuple[jax.Array, Float[Array, "e a"]]) -> tuple[State, State]:
        key, actions = given
        states = step(states, actions, jax.random.split(key, episodes))
        return states, states

    def replan(
        carry: tuple[State, Plans], given: tuple[jax.Array, jax.Array]
    ) -> tuple[tuple[State, Plans], tuple[State, Plans]]:
        (states, last), (key, left) = carry, given
        of_plan, of_world = jax.random.split(key)
        plans = shortened(control(of_plan, states, goals, last, left), environment.longest_action)
        actions = jnp.swapaxes(plans[:, :executed], 0, 1)
        states, seen = jax.lax.scan(act, states, (jax.random.split(of_world, executed), actions))
        return (states, continued(plans, executed)), (seen, plans)

    nothing = jnp.zeros((episodes, horizon, environment.action_width))
    rounds = -(-environment.steps // executed)
    left = environment.steps - executed * jnp.arange(rounds)
    _, (seen, plans) = jax.lax.scan(replan, (start, nothing), (jax.random.split(key, rounds), left))

    def in_order(first: jax.Array, seen: jax.Array) -> jax.Array:
        """Returns [E, T + 1, ...] of [E, ...] and [rounds, executed, E, ...]; T is the length of an episode."""
        later = seen.reshape(-1, *seen.shape[2:])[: environment.steps]
        return jnp.moveaxis(jnp.concatenate([first[None], later]), 0, 1)

    return Episodes(jax.tree.map(in_order, start, seen), goals, jnp.swapaxes(plans, 0, 1))


def random_controller(environment: Environment) -> Controller:
    """Returns the controller that acts at random: directions uniform, norms up to the longest action."""

    def control(key: jax.Array, states: State, goals: State, last: Plans, left: jax.Array) -> Plans:
        direction, size = jax.random.split(key)
        actions = jax.random.normal(direction, last.shape)
        actions = actions / jnp.linalg.norm(actions, axis=-1, keepdims=True)
        return actions * jax.random.uniform(size, (*last.shape[:-1], 1)) * environment.longest_action

    return control


def straight_controller(environment: Any) -> Controller:
    """Returns the controller that goes straight to the goal, of an environment that is `Charted`."""

    def control(key: jax.Array, states: State, goals: State, last: Plans, left: jax.Array) -> Plans:
        actions = jax.vmap(environment.straight)(states, goals)
        first = shortened(actions[:, None], environment.longest_action)
        return jnp.pad(first, ((0, 0), (0, last.shape[1] - 1), (0, 0)))

    return control


def true_controller(environment: Environment, config: Any) -> Controller:
    """Returns the planner that knows the environment's own dynamics and distance."""

    def control(key: jax.Array, states: State, goals: State, last: Plans, left: jax.Array) -> Plans:
        of_world, of_plan = jax.random.split(key)
        weights = time_weights(config.energy, config.horizon, left, config.ramp)
        energy = true_energy(environment, states, goals, weights, of_world)
        return plan(energy, last, of_plan, config, environment.longest_action)[0]

    return control


def model_controller(environment: Environment, config: Any, model: Any, *, shuffled: bool = False) -> Controller:
    """Returns the planner of a model with `encode(frames)` and `rollout(latents, actions)`.

    It sees frames alone. With `shuffled`, the model is given the plans of other episodes.
    """

    def control(key: jax.Array, states: State, goals: State, last: Plans, left: jax.Array) -> Plans:
        now, goal = (model.encode(jax.vmap(environment.frame)(one)) for one in (states, goals))
        weights = time_weights(config.energy, config.horizon, left, config.ramp)
        energy = model_energy(model.rollout, now, goal, weights, shuffled=shuffled)
        return plan(energy, last, key, config, environment.longest_action)[0]

    return control
