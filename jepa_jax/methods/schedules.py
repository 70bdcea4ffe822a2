"""Schedules: functions of the step, evaluated inside the compiled step."""

import jax
import jax.numpy as jnp
import optax


def warmup_cosine(
    peak: float, *, warmup_steps: int, total_steps: int, start: float = 0.0, end: float = 0.0
) -> optax.Schedule:
    """Returns a line from `start` to `peak` at `warmup_steps`, then half a cosine to `end` at `total_steps`."""
    if warmup_steps <= 0:
        return cosine(peak, end, total_steps)
    ramp, fall = linear(start, peak, warmup_steps), cosine(peak, end, total_steps - warmup_steps)
    return lambda count: jnp.where(count < warmup_steps, ramp(count), fall(count - warmup_steps))


def cosine(start: float, end: float, steps: int) -> optax.Schedule:
    """Returns half a cosine from `start` to `end` over `steps`, rising or falling, then constant."""

    def schedule(count: jax.typing.ArrayLike) -> jax.Array:
        progress = jnp.clip(count / max(steps, 1), 0.0, 1.0)
        return end + (start - end) * 0.5 * (1 + jnp.cos(jnp.pi * progress))

    return schedule


def linear(start: float, end: float, steps: int) -> optax.Schedule:
    """Returns a straight line from `start` to `end` over `steps`, then constant."""
    return lambda count: start + (end - start) * jnp.clip(count / max(steps, 1), 0.0, 1.0)
