"""The combinations a search may try, and the steps from one to the next."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from jepa_jax.tuning.trial import Combination

GRAIN = 8  # batches between two powers are multiples of this, for each part of a batch
FEWEST_IMAGES = 16  # of a part: fewer are no batch for losses and norms over one
CLOSE_ENOUGH = 1.15  # no batch is looked for between two that differ by less


@dataclasses.dataclass(frozen=True)
class Space:
    """Values of every knob; without `batch_sizes` any batch, with `fixed_batch` that one in any number of parts."""

    num_workers: tuple[int, ...]
    precisions: tuple[str, ...]
    remats: tuple[str, ...]
    pipelines: tuple[str, ...]
    grad_accum_steps: tuple[int, ...] = ()
    batch_sizes: tuple[int, ...] = ()
    fixed_batch: int | None = None

    def start(self, given: Combination) -> Combination:
        """The config as given; a batch that has to be another one is made so, in parts that divide it."""
        if self.fixed_batch is None or self.fixed_batch == given.batch_size:
            return given
        parts = given.grad_accum_steps if self.fixed_batch % given.grad_accum_steps == 0 else 1
        return dataclasses.replace(given, batch_size=self.fixed_batch, grad_accum_steps=parts)

    def larger(self, combination: Combination) -> Combination | None:
        """Twice the images at a time, or the next of the list."""
        if self.fixed_batch is not None:
            return self._in_parts(combination, [n for n in self._parts() if n < combination.grad_accum_steps], max)
        if self.batch_sizes:
            return self._with_batch(combination, [n for n in self.batch_sizes if n > combination.batch_size], min)
        return dataclasses.replace(combination, batch_size=2 * combination.batch_size)

    def smaller(self, combination: Combination) -> Combination | None:
        """Half the images at a time, or the next of the list."""
        if self.fixed_batch is not None:
            return self._in_parts(combination, [n for n in self._parts() if n > combination.grad_accum_steps], min)
        if self.batch_sizes:
            return self._with_batch(combination, [n for n in self.batch_sizes if n < combination.batch_size], max)
        half = self._rounded(combination.batch_size / 2, combination.grad_accum_steps)
        if half < FEWEST_IMAGES * combination.grad_accum_steps or half >= combination.batch_size:
            return None
        return dataclasses.replace(combination, batch_size=half)

    def slightly_smaller(self, combination: Combination) -> Combination | None:
        """An eighth less where the batch is free."""
        less = self._rounded(7 / 8 * combination.batch_size, combination.grad_accum_steps)
        if self.fixed_batch is not None or self.batch_sizes or less < FEWEST_IMAGES * combination.grad_accum_steps:
            return self.smaller(combination)
        return dataclasses.replace(combination, batch_size=less)

    def between(self, low: Combination, high: Combination) -> Combination | None:
        """Half-way, where the batch is free and the two are not close."""
        if self.fixed_batch is not None or self.batch_sizes or high.batch_size < CLOSE_ENOUGH * low.batch_size:
            return None
        middle = self._rounded((low.batch_size + high.batch_size) / 2, low.grad_accum_steps)
        if not low.batch_size < middle < high.batch_size:
            return None
        return dataclasses.replace(low, batch_size=middle)

    def largest_below(
        self, low: Combination, high: Combination, fits: Callable[[Combination], bool]
    ) -> Combination | None:
        """The largest batch below `high` that fits and is worth a trial after `low`."""
        if self.fixed_batch is not None or self.batch_sizes:
            return None
        step = GRAIN * low.grad_accum_steps
        for batch in range(high.batch_size // step * step, low.batch_size, -step):
            candidate = dataclasses.replace(low, batch_size=batch)
            if fits(candidate):
                return candidate if batch >= CLOSE_ENOUGH * low.batch_size else None
        return None

    def neighbours(self, leader: Combination) -> list[Combination]:
        """Every change of one knob but the batch; with the data on the device there are no workers to change."""
        workers = self.num_workers if leader.pipeline != "device" else ()
        alone: list[dict[str, Any]] = [
            *({"num_workers": value} for value in workers),
            *({"pipeline": value} for value in self.pipelines),
            *({"precision": value} for value in self.precisions),
            *({"remat": value} for value in self.remats),
            *({"grad_accum_steps": value} for value in self.grad_accum_steps if leader.batch_size % value == 0),
        ]
        changed = [self.plain(dataclasses.replace(leader, **change)) for change in alone]
        return [c for c in dict.fromkeys(changed) if c != leader and c.batch_size // c.grad_accum_steps >= 2]

    def plain(self, combination: Combination) -> Combination:
        """With the data on the device workers have nothing to do: none then."""
        return combination if combination.pipeline != "device" else dataclasses.replace(combination, num_workers=0)

    def _parts(self) -> tuple[int, ...]:
        if self.fixed_batch is None or self.grad_accum_steps:
            return self.grad_accum_steps
        powers = [2**k for k in range(12)]
        return tuple(n for n in powers if self.fixed_batch % n == 0 and self.fixed_batch // n >= FEWEST_IMAGES) or (1,)

    def _in_parts(self, combination: Combination, parts: Sequence[int], pick: Callable) -> Combination | None:
        return dataclasses.replace(combination, grad_accum_steps=pick(parts)) if parts else None

    def _with_batch(self, combination: Combination, batches: Sequence[int], pick: Callable) -> Combination | None:
        possible = [batch for batch in batches if batch % combination.grad_accum_steps == 0]
        return dataclasses.replace(combination, batch_size=pick(possible)) if possible else None

    def _rounded(self, batch: float, parts: int) -> int:
        step = GRAIN * parts
        return int(batch // step * step)
