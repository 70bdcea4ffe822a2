"""Plans a config for GPUs: does it fit, how large may its batch be, and what can be changed if it does not fit."""

import bisect
import contextlib
import dataclasses
import itertools
import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from jepa_jax.base.errors import UserError
from jepa_jax.data.contract import element_bytes
from jepa_jax.planning.absent_gpus import num_hosts
from jepa_jax.planning.estimate import (
    FITS,
    FITS_BELOW,
    FRAGMENTATION,
    NO,
    WORKSPACE_MOST_BYTES,
    MemoryNeed,
    exchange_seconds,
    memory_need,
    verdict_of,
)
from jepa_jax.planning.factors import Prediction, predict
from jepa_jax.planning.step_compiler import Request, StepCompiler, StepFacts
from jepa_jax.runtime.hardware import Gpu

if TYPE_CHECKING:
    from jepa_jax.planning.ladder import Ladder

PARTS = (1, 2, 4)  # that the combinations of a frontier divide an accumulation step into
MOST_PARTS = 64  # accumulation steps that a step of the config is divided into
REMATS = ("none", "light", "full")  # values of train.remat, in the order of what they recompute
FEWEST_WAYS = 2  # below this, changes are combined
BATCH_GRAIN = 8  # images per device and accumulation step: largest batches are multiples of this
MOST_COMPILATIONS = 3
MOST_RECOMPUTING = 6  # points of a search in which XLA recomputes
GROWTH, CLOSE_BATCHES = 1.25, 1.07  # of a batch with which XLA recomputes; ratio of two batches that settles a search
CLOSE_ENOUGH = 0.025  # of the memory: a batch that leaves less free is the answer
FIRST_GUESS, LATER_GUESS = 0.99, 0.997  # of what the line predicts: a guess that fits is an answer
MOST_GRAINS = 2**20

AS_IT_IS = "as configured"  # label of a request without changes
Changes = dict[str, Any]  # values of config keys, or {"gpu": Gpu}


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A compiled variant of a config on a GPU: what was changed, what it needs, how fast it can be."""

    request: Request
    label: str
    changes: dict[str, Any]  # config keys and their values, or {"gpu": key}
    facts: StepFacts
    need: MemoryNeed
    speed: Prediction
    unlimited: StepFacts | None = None  # of the program that never recomputes, if XLA recomputes in this one

    @property
    def unlimited_peak(self) -> int:
        """The peak if XLA kept everything; the same unless it recomputes."""
        return (self.unlimited or self.facts).peak_bytes

    @property
    def batch_size(self) -> int:
        return self.request.config.data.batch_size

    @property
    def capacity(self) -> int:
        """Bytes of each device that the step can have: the pool that JAX takes."""
        return self.request.pool_bytes

    @property
    def verdict(self) -> str:
        """FITS, TIGHT or NO."""
        return verdict_of(self.need.total, self.capacity)

    @property
    def fits(self) -> bool:
        """Whether the memory suffices, if only just."""
        return self.verdict != NO


@dataclasses.dataclass(frozen=True)
class LargestBatch:
    """The largest batch found to fit: 0 if none does, None if it was not looked for.

    `at_set`: limited by the size of the data set, not by memory.
    """

    batch_size: int | None
    estimate: Estimate | None
    at_set: bool = False


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


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything that is known about a config on one kind of GPU."""

    largest: list[tuple[Estimate, LargestBatch]]  # as configured first, then with remat, accumulation, other precision
    batches: list[Estimate]  # of --batch_sizes
    ways_out: list[Estimate]  # that fit, the fastest first; empty if the config itself fits
    frontier: Frontier | None = None
    ladder: "Ladder | None" = None

    @property
    def estimate(self) -> Estimate:
        return self.largest[0][0]

    @property
    def request(self) -> Request:
        return self.estimate.request


class FailedPlan(NamedTuple):
    """A GPU for which the step could not be compiled, and why."""

    request: Request
    reason: str


class Planner:
    """Makes plans with one compiler, so that no program is compiled twice."""

    def __init__(self, compiler: StepCompiler, table: Mapping[str, Gpu]):
        self.compiler, self.table = compiler, table

    def estimate(self, request: Request) -> Estimate:
        return self.estimates([(request, AS_IT_IS, {})])[0]

    def with_facts(self, request: Request, facts: StepFacts) -> Estimate:
        """Returns the estimate of a request whose program is known."""
        return self._estimate(request, AS_IT_IS, {}, facts)

    def estimates(self, wanted: Sequence[tuple[Request, str, Changes]]) -> list[Estimate]:
        """Returns estimates of requests with a label and changes each; all compilations are started together."""
        requests = [request.changed(changes) for request, _, changes in wanted]
        all_facts = self.compiler.all_facts(requests)
        return [
            self._estimate(request, label, changes, facts)
            for request, (_, label, changes), facts in zip(requests, wanted, all_facts, strict=True)
        ]

    def possible(self, wanted: Sequence[tuple[Request, str, Changes]]) -> list[Estimate]:
        """Returns `estimates` without those that XLA cannot compile for the GPU."""
        try:
            return self.estimates(wanted)
        except UserError:
            return [] if len(wanted) == 1 else [row for one in wanted for row in self.possible([one])]

    def _estimate(self, request: Request, label: str, changes: Changes, facts: StepFacts) -> Estimate:
        named = {key: getattr(value, "key", value) for key, value in changes.items()}
        data, config = request.data or self.compiler.data, request.config.data
        beside = facts.batch_bytes * (config.prefetch + 1)  # the loader's thread holds one more
        if config.pipeline == "device":
            beside = data.num_train * element_bytes(data.spec)
        need = memory_need(facts.peak_bytes, facts.largest_convolution_bytes, data=beside)
        return Estimate(request, label, named, facts, need, predicted_speed(facts, request))

    def plan(
        self, request: Request, *, batch_sizes: Sequence[int] = (), variants: bool = True, largest: bool = True
    ) -> Plan:
        """Returns the plan of a request and of other batches.

        `variants` also looks for the largest batch with remat, accumulation and the other precision; without `largest`
        neither largest batches nor ways out are looked for.
        """
        changes = variant_changes(request) if variants else []
        own = [self.estimate(request), *self.possible([(request, *change) for change in changes])]
        batches = self.estimates([(request, *batch_change(size)) for size in batch_sizes])
        searched = self.largest_batches(own) if largest else [LargestBatch(None, None)] * len(own)
        found = list(zip(self.with_unlimited(own[:1]) + own[1:], searched, strict=True))
        ways = [] if own[0].fits or not largest else self.ways_out(*found[0])
        return Plan(found, self.with_unlimited(batches), ways)

    def with_unlimited(self, estimates: Sequence[Estimate]) -> list[Estimate]:
        """Adds the need without recomputation to estimates; compiles again only where XLA recomputes."""
        limited = [i for i, estimate in enumerate(estimates) if estimate.facts.recomputed]
        requests = [dataclasses.replace(estimates[i].request, unlimited=True) for i in limited]
        found = dict(zip(limited, self.compiler.all_facts(requests) if requests else [], strict=True))
        return [dataclasses.replace(estimate, unlimited=found.get(i)) for i, estimate in enumerate(estimates)]

    def largest_batches(self, starts: Sequence[Estimate]) -> list[LargestBatch]:
        """Returns the largest batch that fits for each estimated request; the searches run side by side."""
        searches = [search_batch(estimate, self.compiler.data.num_train) for estimate in starts]
        found: dict[int, LargestBatch] = {}
        answers: dict[int, Estimate | None] = dict.fromkeys(range(len(starts)))
        while answers:
            wanted = {}
            for i, answer in answers.items():
                try:
                    wanted[i] = (starts[i].request, *batch_change(searches[i].send(answer)))
                except StopIteration as end:
                    found[i] = end.value
            answers = dict(zip(wanted, self.estimates(list(wanted.values())), strict=True))
        return [found[i] for i in range(len(starts))]

    def ways_out(self, estimate: Estimate, largest: LargestBatch) -> list[Estimate]:
        """Returns compiled changes that make a config fit: the fastest first, then a larger GPU."""
        request = estimate.request
        smaller = largest.estimate
        found = [smaller] if smaller and smaller.batch_size < estimate.batch_size else []
        found += self._fitting(request, single_changes(estimate, enough_parts(estimate)[:1]))
        if len(found) < FEWEST_WAYS:
            found += self._fitting(request, combined_changes(request))
        found.sort(key=lambda way: -way.speed.images_per_sec)
        enough = estimate.need.total / (FITS_BELOW * request.memory_fraction)
        larger = [gpu for gpu in self.table.values() if gpu.memory_bytes >= enough]
        smallest = sorted(larger, key=lambda gpu: gpu.memory_bytes)[:1]
        return found + self._fitting(request, [(gpu.name, {"gpu": gpu}) for gpu in smallest])

    def frontier(self, request: Request, budget_bytes: int = 0) -> Frontier:
        """Compiles every policy of remat with 1, 2 and 4 times the accumulation; the default budget is the card's."""
        points = self.possible([(request, *change) for change in combinations(request)])
        return Frontier(points, budget_bytes or round(FITS_BELOW * request.pool_bytes))

    def _fitting(self, request: Request, candidates: Sequence[tuple[str, Changes]]) -> list[Estimate]:
        return [row for row in self.possible([(request, *change) for change in candidates]) if row.fits]


def predicted_speed(facts: StepFacts, request: Request) -> Prediction:
    """Returns the predicted seconds of a training step."""
    sent = sum(wire for _, wire in facts.collectives.values())
    exchange = exchange_seconds(sent, request.gpu, facts.devices, num_hosts(request.topology))
    return predict(facts.kernels, request.gpu, samples=request.config.data.batch_size, exchange_seconds=exchange)


def batch_change(size: int) -> tuple[str, Changes]:
    return f"batch {size:,}", {"data.batch_size": size}


def variant_changes(request: Request) -> list[tuple[str, Changes]]:
    """Returns the variants that a plan compares: remat, accumulation at the same batch, the other precision."""
    other = "float32" if request.config.train.precision == "bfloat16" else "bfloat16"
    halves = accumulation(request, [2]) if 2 in part_counts(request) else []
    return [*remat(request), *halves, (other, {"train.precision": other})]


def single_changes(estimate: Estimate, parts: Sequence[int]) -> list[tuple[str, Changes]]:
    """Returns changes that need less memory: accumulation in so many parts, remat, bfloat16, FSDP."""
    request, config = estimate.request, estimate.request.config
    changes = accumulation(request, parts) + remat(request)
    if config.train.precision == "float32":
        changes.append(("bfloat16", {"train.precision": "bfloat16"}))
    if request.devices > 1 and config.mesh.fsdp == 1:
        changes.append((f"FSDP over {request.devices}", {"mesh.data": -1, "mesh.fsdp": request.devices}))
    return changes


def combined_changes(request: Request) -> list[tuple[str, Changes]]:
    """Returns what takes the least memory, for configs that no single change makes fit."""
    parts = accumulation(request, part_counts(request)[-1:])
    if not parts:
        return []
    combined = [*remat(request)[-1:], *parts]
    return [(" and ".join(label for label, _ in combined), {k: v for _, keys in combined for k, v in keys.items()})]


def remat(request: Request) -> list[tuple[str, Changes]]:
    """Returns the changes to policies that recompute more than the config's; none if the config does not allow it."""
    more = REMATS[REMATS.index(request.config.train.remat) + 1 :]
    return [(f"remat {policy}", {"train.remat": policy}) for policy in _allowed(request, more)]


def combinations(request: Request) -> list[tuple[str, Changes]]:
    """Returns each policy of remat with each of PARTS, as far as the config allows; the config itself is first."""
    train = request.config.train
    own = {"train.remat": train.remat, "train.accum_steps": train.accum_steps}
    counts = [train.accum_steps * parts for parts in PARTS if parts in (1, *part_counts(request))]
    found: list[tuple[str, Changes]] = []
    for policy, count in itertools.product(_allowed(request, REMATS), counts):
        steps = f", {count} accumulation steps" if count > 1 else ""
        found.append((f"remat {policy}{steps}", {"train.remat": policy, "train.accum_steps": count}))
    return sorted(found, key=lambda pair: pair[1] != own)


def _allowed(request: Request, policies: Sequence[str]) -> Iterator[str]:
    """Yields the policies of remat that the config allows: some models have nothing to recompute."""
    for policy in policies:
        with contextlib.suppress(UserError):
            request.changed({"train.remat": policy})
            yield policy


def accumulation(request: Request, parts: Sequence[int]) -> list[tuple[str, Changes]]:
    """Returns the changes that divide each accumulation step of a config into so many parts."""
    counts = [request.config.train.accum_steps * n for n in parts]
    return [(f"{steps} accumulation steps", {"train.accum_steps": steps}) for steps in counts]


def part_counts(request: Request) -> list[int]:
    """Returns into how many parts an accumulation step can be divided, with at least two images per device and part."""
    images = request.config.data.batch_size // (request.devices * request.config.train.accum_steps)
    return [n for n in range(2, min(images // 2, MOST_PARTS) + 1) if images % n == 0]


def enough_parts(estimate: Estimate) -> list[int]:
    """Returns into how many parts an accumulation step has to be divided to fit, as far as this estimate tells."""
    facts, need = estimate.facts, estimate.need
    fixed = facts.state_bytes + facts.parameter_bytes
    # With accumulation the sum of the gradients is kept beside those of a part.
    room = FITS_BELOW * estimate.capacity - fixed - facts.parameter_bytes
    return [parts for parts in part_counts(estimate.request) if (need.total - fixed) / parts <= room]


def search_batch(first: Estimate, num_train: int) -> Generator[int, Any, LargestBatch]:
    """Searches for the largest batch from one estimate: yields batches to compile and takes their estimates.

    Memory is nearly linear in the batch. The first guess assumes that only state and gradients do not grow with the
    batch; compiling it gives a second point close to the answer, and the line through both points settles the rest.
    Where XLA recomputes to stay within the memory, the line ends: from there the batch grows by a quarter until it no
    longer fits, and the gap is halved.
    """
    grain = BATCH_GRAIN * first.request.devices * first.request.config.train.accum_steps
    largest = max(grain, num_train // grain * grain)
    points = [first]
    while True:
        best = max((p for p in points if p.verdict == FITS), key=lambda point: point.batch_size, default=None)
        size = best.batch_size if best else 0
        above = min((point.batch_size for point in points if point.batch_size > size), default=None)
        if best and best.facts.recomputed:
            guess = size * GROWTH if above is None else (size + above) / 2
            batch, most = min(round(guess / grain) * grain, largest), MOST_RECOMPUTING
            settled = above is not None and above <= CLOSE_BATCHES * size
        else:
            batch, most = min(next_guess(points, grain), largest), 1 + MOST_COMPILATIONS
            free = FITS_BELOW - best.need.total / best.capacity if best else 1.0
            settled = batch <= size or (free < CLOSE_ENOUGH and len(points) > 1)
            settled = settled or (best is None and above is not None and batch >= above)  # nothing smaller is left
        if settled or len(points) >= most or any(point.batch_size == batch for point in points):
            return LargestBatch(size, best, size >= largest)
        points.append((yield batch))


def next_guess(points: Sequence[Estimate], grain: int) -> int:
    """Returns the batch, a multiple of `grain`, at which the need should reach the limit."""
    limit = FITS_BELOW * points[-1].capacity
    counts = range(1, MOST_GRAINS + 1)
    most = max(1, bisect.bisect_right(counts, limit, key=lambda count: predicted_need(points, count * grain)))
    # Where grains are large, less than half of one is no reason to give up a whole one.
    spare = most * (1 - (FIRST_GUESS if len(points) == 1 else LATER_GUESS))
    return (most if spare < 0.5 else math.floor(most - spare)) * grain


def predicted_need(points: Sequence[Estimate], batch_size: int) -> float:
    """Returns the need at another batch: the peak on a line, the workspace of convolutions up to its cap."""
    last = points[-1]
    facts, need = last.facts, last.need
    slope = (need.peak - facts.state_bytes - facts.parameter_bytes) / last.batch_size
    for other in points[:-1]:
        if other.batch_size != last.batch_size:
            slope = (need.peak - other.need.peak) / (last.batch_size - other.batch_size)
    peak = need.peak + max(0.0, slope) * (batch_size - last.batch_size)
    workspace = min(facts.largest_convolution_bytes * batch_size / last.batch_size, WORKSPACE_MOST_BYTES)
    return peak * (1 + FRAGMENTATION) + need.data + workspace
