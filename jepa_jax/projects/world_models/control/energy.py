"""Energies of plans: how far the latents that a model predicts are from that of the goal."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

Plans = Float[Array, "e s h a"]  # of each episode some plans of some actions
Energy = Callable[[Plans], Float[Array, "e s"]]
KINDS = ("sum", "last")


def time_weights(kind: str, horizon: int, left: jax.Array | int | None = None, ramp: float = 0.0) -> Float[Array, " h"]:
    """Returns how much the distance after each action of a plan counts: all, or the last, among those that are left.

    Args:
      kind: "sum" or "last".
      horizon: actions of a plan.
      left: actions until the end of the episode; what comes after it does not count.
      ramp: with "sum", time t of an end at T counts (t / T) ** ramp, so that a way around may lead away at first.
    """
    times = jnp.arange(1, horizon + 1)
    end = horizon if left is None else jnp.minimum(left, horizon)
    return jnp.where(times <= end if kind == "sum" else times == end, (times / end) ** ramp, 0.0)


def goal_energy(
    latents: Float[Array, "*b h d"], goal: Float[Array, "*b d"], weights: Float[Array, " h"]
) -> Float[Array, "*b"]:
    """Returns the mean squared distance of latents to the latent of a goal, as a weighted sum over times."""
    return jnp.mean(jnp.square(latents - goal[..., None, :]), axis=-1) @ weights


def model_energy(
    rollout: Callable[[jax.Array, jax.Array], jax.Array],
    now: Float[Array, "e d"],
    goal: Float[Array, "e d"],
    weights: Float[Array, " h"],
    *,
    shuffled: bool = False,
) -> Energy:
    """Returns the energy of plans under a model.

    Args:
      rollout: from latents [B, 1, D] and actions [B, H, A] to the latents [B, H, D] that follow.
      now, goal: latents of each episode.
      weights: of the times of a plan.
      shuffled: whether the model is given the plans of the next episode, as a control.
    """

    def energy(plans: Plans) -> Float[Array, "e s"]:
        episodes, samples, *shape = plans.shape
        seen = jnp.roll(plans, 1, axis=0) if shuffled else plans
        latents = jnp.repeat(now, samples, axis=0)[:, None]
        following = rollout(latents, seen.reshape(-1, *shape)).reshape(episodes, samples, shape[0], -1)
        return goal_energy(following, goal[:, None], weights)

    return energy


def true_energy(environment: Any, state: Any, goal: Any, weights: Float[Array, " h"], key: jax.Array) -> Energy:
    """Returns the energy of plans under the true dynamics: squared distances of the environment's own measure."""

    def of_plan(state: Any, goal: Any, plan: Float[Array, "h a"]) -> Float[Array, ""]:
        def step(state: Any, action: Float[Array, " a"]) -> tuple[Any, Float[Array, ""]]:
            state = environment.step(state, action, key)
            return state, jnp.square(environment.distance(state, goal))

        return jax.lax.scan(step, state, plan)[1] @ weights

    return lambda plans: jax.vmap(jax.vmap(of_plan, (None, None, 0)))(state, goal, plans)
