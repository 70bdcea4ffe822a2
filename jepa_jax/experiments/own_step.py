"""Measures a training step of the user's own, of a plain JAX program, as the step of a config is measured.

A function `make(batch, precision, workers)` of the user's returns `step` and `batches`: an endless iterable, and a
function that takes one of its elements and returns the loss, a scalar array.
"""

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import jax

from jepa_jax.base.classes import load_object
from jepa_jax.base.errors import UserError
from jepa_jax.data.pipeline import TrainBatches
from jepa_jax.experiments.measurement import TimedSteps, check_device, device_facts, measure_steps
from jepa_jax.experiments.rows import TrialFigures
from jepa_jax.experiments.settings import TrialRequest
from jepa_jax.profiling.accounting import DeviceClock
from jepa_jax.profiling.compilations import CompilationCounter
from jepa_jax.runtime import memory as process_memory

READY_BATCHES, READY_PER_WORKER = 3, 2  # that a loader may have made while the step was compiled


@dataclasses.dataclass(frozen=True)
class Loss:
    """The loss of a step, in the form of the metrics that the training loop reads."""

    packed: jax.Array

    def floats(self) -> dict[str, float]:
        return {"loss": float(self.packed)}


def measure_own_step(request: TrialRequest) -> TrialFigures:
    check_device(request)
    chosen = request.combination
    with contextlib.closing(DeviceClock()) as device, CompilationCounter() as compilations:
        made = load_object(request.make)(chosen.batch_size, chosen.precision, chosen.num_workers)
        if not isinstance(made, tuple) or len(made) != 2 or not callable(made[0]):
            raise UserError(f"{request.make} returned {type(made).__name__}; return a tuple of step and batches")
        step, batches = made

        def take_step(state: None, batch: Any) -> tuple[None, Loss]:
            loss = step(batch)
            if not isinstance(loss, jax.Array) or loss.ndim:
                raise UserError(f"the step of {request.make} returned {type(loss).__name__}; return a scalar jax.Array")
            return None, Loss(loss)

        deliveries: Any = endless(batches, request.make)
        loop = TimedSteps(take_step, None, TrainBatches(deliveries), device)  # type: ignore[arg-type]
        loop.take(1)
        loop.drain()
        process_memory.reset_peak()  # compiling may have taken more than any step will
        figures = measure_steps(request, loop, READY_BATCHES + READY_PER_WORKER * chosen.num_workers)
    return dataclasses.replace(
        figures,
        **device_facts(jax.devices()),
        compile_seconds=compilations.seconds,
        compile_cached=compilations.from_cache > 0,
    )


def endless(batches: Iterable[Any], make: str) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yields batches as the loader of a config delivers them."""
    count = 0
    for batch in batches:
        count += 1
        yield batch, {}
    raise UserError(f"the batches of {make} ended after {count}; repeat them without end")
