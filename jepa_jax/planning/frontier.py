"""Compares what policies of remat and accumulation save in memory with what they cost in predicted time.

Every combination is compiled. Those that no other one beats in both memory and time are the frontier; the fastest one
within a budget of memory is the advice.
"""

import dataclasses
import itertools
from collections.abc import Sequence

from jepa_jax.base.errors import UserError
from jepa_jax.planning.estimate import FITS_BELOW, Estimate
from jepa_jax.planning.planner import REMATS, Changes, Planner, part_counts
from jepa_jax.planning.step_compiler import Request

PARTS = (1, 2, 4)  # that each accumulation step of the config is divided into


@dataclasses.dataclass(frozen=True)
class Frontier:
    """Compiled combinations of one config, the config itself first, and the memory they may need."""

    points: Sequence[Estimate]
    budget_bytes: int

    def beats(self, one: Estimate, other: Estimate) -> bool:
        """Returns whether one combination needs no more memory and no more time than another, and less of one."""
        mine, theirs = ((e.need.total, -e.speed.images_per_sec) for e in (one, other))
        return mine != theirs and all(a <= b for a, b in zip(mine, theirs, strict=True))

    @property
    def best(self) -> list[Estimate]:
        """The combinations that none beats, those that need the least memory first."""
        kept = [point for point in self.points if not any(self.beats(other, point) for other in self.points)]
        return sorted(kept, key=lambda point: point.need.total)

    @property
    def advice(self) -> Estimate | None:
        """The fastest combination within the budget; None if there is none."""
        inside = [point for point in self.points if point.need.total <= self.budget_bytes]
        return max(inside, key=lambda point: point.speed.images_per_sec, default=None)


def make_frontier(planner: Planner, request: Request, budget_bytes: int = 0) -> Frontier:
    """Compiles every policy of remat with every division into parts; by default the budget is what fits the card."""
    wanted = [(request, label, changes) for label, changes in combinations(request)]
    return Frontier(planner.estimates(wanted), budget_bytes or round(FITS_BELOW * request.gpu.memory_bytes))


def combinations(request: Request) -> list[tuple[str, Changes]]:
    """Returns the changes to compare, without those that the config does not allow; the config itself is first."""
    config = request.config
    divisible = {1, *part_counts(request)}
    found: list[tuple[str, Changes]] = []
    for policy, parts in itertools.product(REMATS, PARTS):
        changes: Changes = {"train.remat": policy, "train.accum_steps": config.train.accum_steps * parts}
        if parts not in divisible:
            continue
        try:
            request.changed(changes)
        except UserError:
            continue
        steps = f", {changes['train.accum_steps']} accumulation steps" if changes["train.accum_steps"] > 1 else ""
        found.append((f"remat {policy}{steps}", changes))
    own = {"train.remat": config.train.remat, "train.accum_steps": config.train.accum_steps}
    return sorted(found, key=lambda pair: pair[1] != own)
