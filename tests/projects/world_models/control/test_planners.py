import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jepa_jax.projects.world_models.control.config import ControlConfig
from jepa_jax.projects.world_models.control.energy import time_weights
from jepa_jax.projects.world_models.control.episodes import straight_controller, true_controller
from jepa_jax.projects.world_models.control.planners import PlannerConfig, correlated, plan, shortened
from jepa_jax.projects.world_models.control.trial import Trial
from jepa_jax.projects.world_models.control.two_rooms import TwoRoomsEnvironment
from tests.projects.world_models.rooms import rooms_data

HORIZON, GOAL = 6, jnp.array([[0.4, -0.3], [-0.2, 0.5]])


def quadratic(plans: jax.Array) -> jax.Array:
    """Returns the squared distance of all actions [E, S, H, A] to one of each episode."""
    return jnp.sum(jnp.square(plans - GOAL[:, None, None]), axis=(2, 3))


@pytest.mark.parametrize(("planner", "iterations"), [("cem", 40), ("mppi", 60), ("gradient", 80)])
def test_the_minimum_of_a_quadratic_is_found(planner: str, iterations: int) -> None:
    config = PlannerConfig(
        planner=planner, horizon=HORIZON, samples=128, iterations=iterations, spread=0.3, smoothness=0.0, elites=16,
        temperature=0.1, rate=0.05,
    )  # fmt: skip
    start = jnp.zeros((2, HORIZON, 2))
    found, energies = jax.jit(lambda key: plan(quadratic, start, key, config, longest=1.0))(jax.random.key(0))
    assert (np.diff(energies, axis=0) <= 0).all()
    assert energies[-1].max() < 0.15 * quadratic(start[:, None])[:, 0].min()
    tolerance = 0.35 if planner == "mppi" else 0.1
    np.testing.assert_allclose(found, jnp.broadcast_to(GOAL[:, None], found.shape), atol=tolerance)


def test_actions_are_shortened_to_the_longest_one() -> None:
    actions = jax.random.normal(jax.random.key(0), (100, 2))
    short = shortened(actions, 1.0)
    assert jnp.linalg.norm(short, axis=-1).max() <= 1 + 1e-6
    within = jnp.linalg.norm(actions, axis=-1) <= 1
    np.testing.assert_allclose(short[within], actions[within], rtol=1e-6)


def test_noise_of_consecutive_actions_is_correlated() -> None:
    mixing = correlated(20, 0.9).astype(np.float64)
    np.testing.assert_allclose((mixing @ mixing.T)[3, :8], 0.9 ** np.abs(3 - np.arange(8)), rtol=1e-5)


def test_what_comes_after_the_end_of_an_episode_does_not_count() -> None:
    np.testing.assert_array_equal(time_weights("sum", 5), [1, 1, 1, 1, 1])
    np.testing.assert_array_equal(time_weights("sum", 5, 3), [1, 1, 1, 0, 0])
    np.testing.assert_array_equal(time_weights("last", 5), [0, 0, 0, 0, 1])
    np.testing.assert_array_equal(time_weights("last", 5, 3), [0, 0, 1, 0, 0])


@pytest.mark.slow
@pytest.mark.parametrize("planner", ["cem", "mppi"])
def test_a_planner_that_knows_the_dynamics_finds_the_door(planner: str) -> None:
    config = ControlConfig(
        planner=planner, energy="last", horizon=24, executed=2, samples=128, iterations=5, elites=8, temperature=0.1
    )
    environment = TwoRoomsEnvironment(rooms_data(), None)
    tasks = jax.vmap(environment.task)(jax.random.split(jax.random.key(0), 100))
    trial = Trial(environment, config, tasks, jax.random.key(1))
    played, _ = trial.play("true", lambda: true_controller(environment, config))
    assert trial.success_rate(played) >= 98
    straight, _ = trial.play("straight", lambda: straight_controller(environment))
    assert trial.success_rate(straight) < 50  # the wall is in the way of most
