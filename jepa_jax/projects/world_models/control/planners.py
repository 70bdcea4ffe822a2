"""Planners: search for the actions of least energy, for many episodes at once.

A plan is the mean of a search, [H, A] for each episode; all arrays have the axis of episodes in front. Noise of
consecutive actions is correlated, so that random plans get somewhere. References: Williams et al., "Information
Theoretic MPC", ICRA 2017; Pinneri et al., "Sample-efficient Cross-Entropy Method for Real-time Planning", CoRL 2020.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from jepa_jax.config.groups import Config
from jepa_jax.config.schema import Group, Problem, key
from jepa_jax.projects.world_models.control.energy import KINDS, Energy, Plans

Means = Float[Array, "e h a"]


@dataclasses.dataclass(frozen=True)
class PlannerConfig(Group):
    """How plans are found."""

    planner: str = key(
        "cem",
        "search: cross-entropy, path-integral, or descent along the gradient of the energy",
        choices=("cem", "mppi", "gradient"),
    )
    energy: str = key("sum", "distance to the goal: summed over the predicted times, or of the last one", choices=KINDS)
    ramp: float = key(
        0.0, "sum: exponent of the time with which later distances count more, so that detours are found", least=0
    )
    horizon: int = key(30, "actions of a plan", least=1)
    executed: int = key(1, "actions of a plan that are executed before the next one is made", least=1)
    samples: int = key(200, "plans per iteration", least=2)
    iterations: int = key(20, "rounds of search", least=1)
    spread: float = key(1.0, "standard deviation of the first samples, in units of the longest action", least=1e-6)
    smoothness: float = key(0.9, "correlation of the noise of consecutive actions", least=0, most=0.999)
    elites: int = key(8, "cem: plans of least energy that the next ones are drawn around", least=2)
    temperature: float = key(
        0.2, "mppi: by how many standard deviations of the energies a plan's weight falls to 1/e", least=1e-6
    )
    rate: float = key(0.1, "gradient: step of Adam, in units of the longest action", least=1e-6)

    def problems(self, config: Config) -> Iterator[Problem]:
        if self.executed > self.horizon:
            yield Problem("method.control.executed", f"more than method.control.horizon = {self.horizon}; use less")
        if self.planner == "cem" and self.elites > self.samples:
            yield Problem("method.control.elites", f"more than method.control.samples = {self.samples}; use less")


class Search(NamedTuple):
    """What a planner carries from iteration to iteration: the best plan of each episode so far is never lost."""

    mean: Means
    std: Means
    best: Means
    least: Float[Array, " e"]


Update = Callable[[Plans, Float[Array, "e s"], Search], tuple[Means, Means]]


def plan(
    energy: Energy, start: Means, key: jax.Array, config: Any, longest: float
) -> tuple[Means, Float[Array, "iterations e"]]:
    """Returns the plan of least energy that was found for each episode, and its energy after each iteration.

    Args:
      energy: of plans [E, S, H, A].
      start: plans to begin with, e.g. the rest of the last ones.
      config: PlannerConfig.
      longest: norm that actions are shortened to.
    """
    search = descend if config.planner == "gradient" else sample
    return search(energy, start, key, config, longest)


def sample(
    energy: Energy, start: Means, key: jax.Array, config: Any, longest: float
) -> tuple[Means, Float[Array, "iterations e"]]:
    """Plans by samples around a mean, which moves to the better ones; see `plan`."""
    update = elite_update(config.elites) if config.planner == "cem" else weighted_update(config.temperature)
    mixing = correlated(start.shape[1], config.smoothness)

    def iterate(search: Search, key: jax.Array) -> tuple[Search, Float[Array, " e"]]:
        episodes, *shape = search.mean.shape
        noise = jax.random.normal(key, (episodes, config.samples - 2, *shape))
        noise = jnp.einsum("hk,eska->esha", mixing, noise) * search.std[:, None]
        kept = jnp.stack([search.mean, search.best], axis=1)
        plans = shortened(jnp.concatenate([kept, search.mean[:, None] + noise], axis=1), longest)
        energies = energy(plans)
        search = with_best(search, plans, energies)
        mean, std = update(plans, energies, search)
        return search._replace(mean=mean, std=std), search.least

    std = jnp.full(start.shape, config.spread * longest)
    first = Search(start, std, start, jnp.full(len(start), jnp.inf))
    last, energies = jax.lax.scan(iterate, first, jax.random.split(key, config.iterations))
    return last.best, energies


def descend(
    energy: Energy, start: Means, key: jax.Array, config: Any, longest: float
) -> tuple[Means, Float[Array, "iterations e"]]:
    """Plans by Adam from several beginnings at once; see `plan`."""
    rule = optax.adam(config.rate * longest)
    mixing = correlated(start.shape[1], config.smoothness)
    noise = jax.random.normal(key, (len(start), config.samples - 1, *start.shape[1:]))
    noise = jnp.einsum("hk,eska->esha", mixing, noise) * config.spread * longest
    plans = shortened(jnp.concatenate([start[:, None], start[:, None] + noise], axis=1), longest)

    def total(plans: Plans) -> tuple[Float[Array, ""], Float[Array, "e s"]]:
        energies = energy(plans)
        return jnp.sum(energies), energies

    def iterate(carry: Any, _: None) -> tuple[Any, Float[Array, " e"]]:
        plans, state, search = carry
        gradient, energies = jax.grad(total, has_aux=True)(plans)
        search = with_best(search, plans, energies)
        updates, state = rule.update(gradient, state)
        return (shortened(plans + updates, longest), state, search), search.least

    first = Search(start, jnp.zeros_like(start), start, jnp.full(len(start), jnp.inf))
    (plans, _, search), energies = jax.lax.scan(iterate, (plans, rule.init(plans), first), None, config.iterations)
    search = with_best(search, plans, energy(plans))
    return search.best, energies


def with_best(search: Search, plans: Plans, energies: Float[Array, "e s"]) -> Search:
    """Returns a search that knows the best of these plans if none before was as good."""
    index = jnp.argmin(energies, axis=1)
    found = jnp.take_along_axis(plans, index[:, None, None, None], axis=1)[:, 0]
    least = jnp.min(energies, axis=1)
    better = least < search.least
    return search._replace(
        best=jnp.where(better[:, None, None], found, search.best), least=jnp.minimum(least, search.least)
    )


def elite_update(elites: int) -> Update:
    """Returns the cross-entropy rule: mean and standard deviation of the plans of least energy."""

    def update(plans: Plans, energies: Float[Array, "e s"], search: Search) -> tuple[Means, Means]:
        del search
        index = jax.lax.top_k(-energies, elites)[1]
        chosen = jnp.take_along_axis(plans, index[:, :, None, None], axis=1)
        return jnp.mean(chosen, axis=1), jnp.std(chosen, axis=1)

    return update


def weighted_update(temperature: float) -> Update:
    """Returns the path-integral rule: the mean of all plans, weighted by exp(-energy / temperature)."""

    def update(plans: Plans, energies: Float[Array, "e s"], search: Search) -> tuple[Means, Means]:
        scale = temperature * jnp.std(energies, axis=1, keepdims=True) + 1e-12
        weights = jax.nn.softmax(-energies / scale, axis=1)
        return jnp.einsum("es,esha->eha", weights, plans), search.std

    return update


def shortened(actions: Float[Array, "*b a"], longest: float) -> Float[Array, "*b a"]:
    """Returns actions whose norm is at most `longest`."""
    norm = jnp.sqrt(jnp.sum(jnp.square(actions), axis=-1, keepdims=True) + 1e-12)
    return actions * jnp.minimum(1, longest / norm)


def correlated(length: int, smoothness: float) -> np.ndarray:
    """Returns the matrix that gives white noise a correlation of smoothness ** |i - j| between times i and j."""
    times = np.arange(length)
    return np.linalg.cholesky(smoothness ** np.abs(times[:, None] - times)).astype(np.float32)


def continued(plans: Means, executed: int) -> Means:
    """Returns what is left of plans, followed by actions of zero."""
    return jnp.pad(plans[:, executed:], ((0, 0), (0, executed), (0, 0)))
