"""Schedules: functions of the step, evaluated inside the compiled step."""

import jax
import jax.numpy as jnp
import optax


def warmed_up(schedule: optax.Schedule, start: float, peak: float, warmup_steps: int) -> optax.Schedule:
    """Returns a line from `start` to `peak` at `warmup_steps`, where `schedule` begins."""
    if warmup_steps <= 0:
        return schedule
    ramp = linear(start, peak, warmup_steps)
    return lambda count: jnp.where(count < warmup_steps, ramp(count), schedule(count - warmup_steps))


def cosine(start: float, end: float, steps: int) -> optax.Schedule:
    """Returns half a cosine from `start` to `end` over `steps`, rising or falling, then constant."""

    def schedule(count: jax.typing.ArrayLike) -> jax.Array:
        progress = jnp.clip(count / max(steps, 1), 0.0, 1.0)
        return end + (start - end) * 0.5 * (1 + jnp.cos(jnp.pi * progress))

    return schedule


def linear(start: float, end: float, steps: int) -> optax.Schedule:
    """Returns a straight line from `start` to `end` over `steps`, then constant."""
    return lambda count: start + (end - start) * jnp.clip(count / max(steps, 1), 0.0, 1.0)
