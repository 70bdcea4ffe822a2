"""A schedule of your own: `optim.schedule=wsd_sqrt:make`, warm-up, stable, and a decay by 1 - sqrt.

    export PYTHONPATH=docs/examples
    jepa-jax train --config=quickstart --config.optim.schedule=wsd_sqrt:make --workdir=runs/wsd_sqrt

Reference: Hägele et al., "Scaling Laws and Compute-Optimal Training Beyond Fixed Training Durations", NeurIPS 2024.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jepa_jax.config.schema import Group, key


@dataclasses.dataclass(frozen=True)
class WsdSqrtKeys(Group):
    """Keys that `optim` has with this schedule: `--config.optim.cooldown=0.1`."""

    cooldown: float = key(0.2, "fraction of the run, at its end, in which the rate decays", least=0, most=1)


def make(optim: Any, *, peak: float, start: float, end: float, warmup_steps: int, total_steps: int) -> optax.Schedule:
    """Returns the rate by step: from `start` to `peak` in the warm-up, at the end from `peak` to `end`.

    It is called once for `optim.lr`, and once for each group of parameters with a rate of its own.
    """
    steps = max(1, round(optim.cooldown * total_steps))

    def rate(step: jax.typing.ArrayLike) -> jax.Array:
        warm = jnp.clip(step / max(1, warmup_steps), 0, 1)
        cold = jnp.sqrt(jnp.clip((step - total_steps + steps) / steps, 0, 1))
        return start + (peak - start) * warm + (end - peak) * cold

    return rate


make.Keys = WsdSqrtKeys  # type: ignore[attr-defined]
