"""Says before a run whether it fits a GPU, how large its batch may be, what to change if not, and how fast it can be.

Memory is that of the compiled step (`gpu_compile`), a lower bound: what only a real device decides (workspace of
convolutions, CUDA's own memory, buffers of collectives) is added as a margin, each part of it stated. Speed is a bound
by roofline: the larger of the time the products need at the GPU's peak and the time the bytes need at its bandwidth, if
every kernel reads and writes memory and nothing stays in the cache.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jepa_jax.planning.gpu_compile import Facts, Request, StepCompiler
from jepa_jax.runtime.hardware import Gpu

GIB = 2**30
# Parts of the margin.
CONTEXT_BYTES = 600 * 2**20  # CUDA's context, the handles and kernels of cuBLAS and cuDNN
WORKSPACE_MOST_BYTES = GIB  # of the largest convolution; up to here it is taken to need as much as it reads and writes
COLLECTIVE_BYTES = 512 * 2**20  # NCCL's buffers, with more than one device
FRAGMENTATION = 0.02  # of the peak: holes that the allocator cannot use
FITS_BELOW = 0.95  # of the memory; above it a plan is called tight
EFFICIENCY = (0.3, 0.7)  # of the bound: what training programs reach
BATCH_GRAIN = 8  # images a device and part: largest batches are multiples of this
CLOSE_ENOUGH = 0.025  # of the memory: a batch that leaves less free is the largest
MOST_TRIES = 3
FIRST_GUESS, LATER_GUESS = 0.99, 0.997
MOST_GRAINS = 2**20
MOST_PARTS = 64
FEWEST_WAYS = 2  # out of a config that does not fit, before changes are combined

FITS, TIGHT, NO = "fits", "tight", "does not fit"


@dataclasses.dataclass(frozen=True)
class Need:
    """Memory of one device, in bytes: what the step takes, and what is added to it."""

    peak: int
    data: int
    context: int
    workspace: int
    collectives: int
    fragmentation: int

    @property
    def margin(self) -> int:
        return self.context + self.workspace + self.collectives + self.fragmentation

    @property
    def total(self) -> int:
        return self.peak + self.data + self.margin

    @property
    def pool(self) -> int:
        """The part that JAX's own allocator has to hold."""
        return self.total - self.context - self.collectives


@dataclasses.dataclass(frozen=True)
class Speed:
    """Seconds that a step cannot be faster than, by what limits it."""

    batch_size: int
    compute_seconds: float
    memory_seconds: float
    network_seconds: float

    @property
    def seconds(self) -> float:
        return max(self.compute_seconds, self.memory_seconds, self.network_seconds)

    @property
    def images_per_sec(self) -> float:
        return self.batch_size / self.seconds

    @property
    def predicted(self) -> tuple[float, float]:
        """Images a second, from and to: the bound times the efficiency that programs reach."""
        return self.images_per_sec * EFFICIENCY[0], self.images_per_sec * EFFICIENCY[1]

    @property
    def limit(self) -> str:
        parts = {"compute": self.compute_seconds, "memory bandwidth": self.memory_seconds}
        parts["network"] = self.network_seconds
        return max(parts, key=lambda name: parts[name])


@dataclasses.dataclass(frozen=True)
class Row:
    """One compiled program: what was changed, what it needs, how fast it can be."""

    label: str
    changes: dict[str, Any]  # config keys and their values, or {"gpu": key}
    facts: Facts
    need: Need
    capacity: int
    speed: Speed

    @property
    def verdict(self) -> str:
        if self.need.total > self.capacity:
            return NO
        return FITS if self.need.total <= FITS_BELOW * self.capacity else TIGHT


@dataclasses.dataclass(frozen=True)
class Largest:
    """The largest batch found to fit; 0 if none does. `at_set`: it ends at the size of the data set."""

    batch_size: int
    row: Row | None
    at_set: bool = False


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything known of one GPU."""

    request: Request
    row: Row
    batches: list[Row]  # of --batch_sizes
    largest: list[tuple[Row, Largest]]  # as configured first, then with remat, accumulation, another precision
    ways_out: list[Row]  # that fit, the fastest first; empty if the config itself does


def memory_need(facts: Facts, config: Any, data_bytes: int = 0) -> Need:
    """What a device has to hold; `data_bytes`: of a data set that is kept on the device."""
    waiting = facts.batch_bytes * (config.data.prefetch + 1)  # one more is in the hands of the thread that puts them
    return Need(
        peak=facts.peak_bytes,
        data=data_bytes if config.data.pipeline == "device" else waiting,
        context=CONTEXT_BYTES,
        workspace=min(facts.largest_convolution_bytes, WORKSPACE_MOST_BYTES),
        collectives=COLLECTIVE_BYTES if facts.devices > 1 else 0,
        fragmentation=round(FRAGMENTATION * facts.peak_bytes),
    )


def speed_bound(facts: Facts, gpu: Gpu) -> Speed:
    sent = sum(wire for _, wire in facts.collectives.values())
    return Speed(
        batch_size=facts.batch_size,
        compute_seconds=facts.flops / facts.devices / (gpu.tflops(facts.precision) * 1e12),
        memory_seconds=facts.bytes_moved / (gpu.bandwidth_gb_per_second * 1e9),
        network_seconds=sent / (gpu.interconnect_gb_per_second * 1e9),
    )


class Planner:
    """Makes plans with one compiler, so that nothing is compiled twice."""

    def __init__(self, compiler: StepCompiler, table: Mapping[str, Gpu]):
        self.compiler, self.table = compiler, table

    def row(self, request: Request, label: str = "as configured", **changes: Any) -> Row:
        return self.rows([(request, label, changes)])[0]

    def rows(self, wanted: Sequence[tuple[Request, str, dict[str, Any]]]) -> list[Row]:
        """Rows of requests with changes to their config; all compilations at once."""
        requests = [request.changed(**changes) for request, _, changes in wanted]
        return [
            self._finish(request, label, changes, facts)
            for request, (_, label, changes), facts in zip(
                requests, wanted, self.compiler.all_facts(requests), strict=True
            )
        ]

    def _finish(self, request: Request, label: str, changes: dict[str, Any], facts: Facts) -> Row:
        named = {key.replace("__", "."): getattr(value, "key", value) for key, value in changes.items()}
        need = memory_need(facts, request.config, self._data_bytes(request.config))
        speed = speed_bound(facts, request.gpu)
        return Row(label, named, facts, need, request.gpu.memory_bytes, speed)

    def _data_bytes(self, config: Any) -> int:
        return self.compiler.data.num_train * (3 * config.data.image_size**2 + 4)

    def plans(
        self, requests: Sequence[Request], *, batch_sizes: Sequence[int] = (), variants: bool = True
    ) -> list[Plan]:
        """A plan for each request; without `variants` the largest batch is found for the config as it is alone."""
        compared = [
            [("as configured", {}), *(variant_changes(request) if variants else [])] for request in requests
        ]  # fmt: skip
        others = [(f"batch {size:,}", {"data__batch_size": size}) for size in batch_sizes]
        rows = self._grouped(requests, [[*group, *others] for group in compared])
        starts = [
            (request.changed(**changes), row)
            for request, group, found in zip(requests, compared, rows, strict=True)
            for (_, changes), row in zip(group, found, strict=False)  # those of `others` come last
        ]
        searched = iter(self.largest_batches(starts))
        plans = []
        for request, group, found in zip(requests, compared, rows, strict=True):
            largest = [next(searched) for _ in group]
            ways_out = self.ways_out(request, found[0], largest[0]) if found[0].verdict == NO else []
            pairs = list(zip(found, largest, strict=False))
            plans.append(Plan(request, found[0], found[len(group) :], pairs, ways_out))
        return plans

    def _grouped(
        self, requests: Sequence[Request], changes: Sequence[Sequence[tuple[str, dict[str, Any]]]]
    ) -> list[list[Row]]:
        """Rows of every request with each of its changes; all compilations at once."""
        wanted = [
            (request, label, keys) for request, group in zip(requests, changes, strict=True) for label, keys in group
        ]
        rows = iter(self.rows(wanted))
        return [[next(rows) for _ in group] for group in changes]

    def largest_batches(self, starts: Sequence[tuple[Request, Row]]) -> list[Largest]:
        """For each request the largest batch that fits: memory is nearly linear in it, so draw the line, then confirm.

        The first guess takes arguments and gradients for what does not grow with the batch; the second point it gives
        is close to the answer, and the line through both settles the rest.
        """
        points = [[row] for _, row in starts]
        results: list[Largest | None] = [None] * len(starts)
        for _ in range(MOST_TRIES):
            tries = []
            for i, (request, _) in enumerate(starts):
                if results[i] is None:
                    size = next_batch(points[i], request)
                    size, at_set = min(size, self._most_images(request)), size >= self._most_images(request)
                    results[i] = settled(points[i], size, at_set)
                    if results[i] is None:
                        tries.append((i, (request, f"batch {size:,}", {"data__batch_size": size})))
            for (i, _), row in zip(tries, self.rows([wanted for _, wanted in tries]), strict=True):
                points[i].append(row)
        return [result or best_of(points[i]) for i, result in enumerate(results)]

    def _most_images(self, request: Request) -> int:
        grain = batch_grain(request)
        return max(grain, self.compiler.data.num_train // grain * grain)

    def ways_out(self, request: Request, row: Row, largest: Largest) -> list[Row]:
        """Changes that make a config fit, each compiled: those of the config, the fastest first, then a larger card."""
        found = []
        if largest.row is not None and largest.batch_size < row.facts.batch_size:
            found.append(dataclasses.replace(largest.row, label=f"batch {largest.batch_size:,}"))
        found += self._fitting(request, single_changes(request, row))
        if len(found) < FEWEST_WAYS:
            found += self._fitting(request, combined_changes(request))
        found.sort(key=lambda way: -way.speed.images_per_sec)
        card = min(
            (gpu for gpu in self.table.values() if FITS_BELOW * gpu.memory_bytes >= row.need.total),
            key=lambda gpu: gpu.memory_bytes,
            default=None,
        )
        return found + (self._fitting(request, [(card.name, {"gpu": card})]) if card else [])

    def _fitting(self, request: Request, candidates: Sequence[tuple[str, dict[str, Any]]]) -> list[Row]:
        rows = self.rows([(request, label, changes) for label, changes in candidates])
        return [row for row in rows if row.verdict != NO]


def single_changes(request: Request, row: Row) -> list[tuple[str, dict[str, Any]]]:
    """Config changes that may be enough by themselves."""
    config = request.config
    changes: list[tuple[str, dict[str, Any]]] = []
    if config.train.precision == "float32":
        changes.append(("bfloat16", {"train__precision": "bfloat16"}))
    if can_remat(config):
        changes.append(("remat", {"train__remat": "full"}))
    for parts in part_counts(request):
        # With accumulation the sum of the gradients is kept beside those of a part.
        needed = fixed_bytes(row) + row.facts.parameter_bytes + image_bytes(row) * row.facts.batch_size / parts
        if needed <= FITS_BELOW * row.capacity:
            changes.append(accumulation(config, parts))
            break
    if request.devices > 1 and config.mesh.fsdp == 1:
        changes.append((f"FSDP over {request.devices}", {"mesh__data": -1, "mesh__fsdp": request.devices}))
    return changes


def combined_changes(request: Request) -> list[tuple[str, dict[str, Any]]]:
    """What takes the least memory, for configs that no single change makes fit."""
    counts = part_counts(request)
    if not counts:
        return []
    label, changes = accumulation(request.config, counts[-1])
    if not can_remat(request.config):
        return [(label, changes)]
    return [(f"remat and {label}", {**changes, "train__remat": "full"})]


def accumulation(config: Any, parts: int) -> tuple[str, dict[str, Any]]:
    steps = config.train.accum_steps * parts
    return f"{steps} accumulation steps", {"train__accum_steps": steps}


def part_counts(request: Request) -> list[int]:
    """Into how many parts each part of the batch can be cut, with at least two images a device and part."""
    images = request.config.data.batch_size // (request.devices * request.config.train.accum_steps)
    return [n for n in range(2, min(images // 2, MOST_PARTS) + 1) if images % n == 0]


def variant_changes(request: Request) -> list[tuple[str, dict[str, Any]]]:
    """The configs that a plan compares: with remat, with accumulation at the same batch, in the other precision."""
    config = request.config
    variants: list[tuple[str, dict[str, Any]]] = []
    if can_remat(config):
        variants.append(("remat", {"train__remat": "full"}))
    if 2 in part_counts(request):
        variants.append(accumulation(config, 2))
    other = "float32" if config.train.precision == "bfloat16" else "bfloat16"
    return [*variants, (other, {"train__precision": other})]


def can_remat(config: Any) -> bool:
    return config.train.remat == "none" and config.model.name != "patchnet"


def batch_grain(request: Request) -> int:
    return BATCH_GRAIN * request.devices * request.config.train.accum_steps


def fixed_bytes(row: Row) -> float:
    """What does not grow with the batch: state, gradients and the constant parts of the margin."""
    facts, need = row.facts, row.need
    return facts.state_bytes + facts.parameter_bytes + need.context + need.collectives


def image_bytes(row: Row) -> float:
    return max(1.0, (row.need.total - fixed_bytes(row)) / row.facts.batch_size)


def next_batch(points: Sequence[Row], request: Request) -> int:
    """The batch at which the need should reach the limit, by one point and a guess, or by two points."""
    last, grain = points[-1], batch_grain(request)
    limit = FITS_BELOW * last.capacity
    most = 2
    while predicted_need(points, most * grain) <= limit and most < MOST_GRAINS:
        most *= 2
    fewest = 1
    while most - fewest > 1:
        middle = (fewest + most) // 2
        fewest, most = (middle, most) if predicted_need(points, middle * grain) <= limit else (fewest, middle)
    # A little less than the line says: a guess that fits is an answer, one that does not is only a point. Where grains
    # are large, less than half of one is no reason to give up a whole one.
    spare = fewest * (1 - (FIRST_GUESS if len(points) == 1 else LATER_GUESS))
    return (fewest if spare < 0.5 else math.floor(fewest - spare)) * grain


def predicted_need(points: Sequence[Row], batch_size: int) -> float:
    """The need at another batch: the peak on a line, the workspace of convolutions up to its cap."""
    last = points[-1]
    facts, need = last.facts, last.need
    slope = (need.peak - facts.state_bytes - facts.parameter_bytes) / facts.batch_size
    for other in points[:-1]:
        if other.facts.batch_size != facts.batch_size:
            slope = (need.peak - other.need.peak) / (facts.batch_size - other.facts.batch_size)
    peak = need.peak + max(0.0, slope) * (batch_size - facts.batch_size)
    workspace = min(facts.largest_convolution_bytes * batch_size / facts.batch_size, WORKSPACE_MOST_BYTES)
    return peak * (1 + FRAGMENTATION) + need.data + workspace + need.context + need.collectives


def settled(points: Sequence[Row], size: int, at_set: bool) -> Largest | None:
    """The answer, if one more compilation would not change it."""
    best = best_of(points)
    if best.row is None:
        smallest = min(row.facts.batch_size for row in points)
        return best if size >= smallest else None  # nothing smaller is left to try
    free = FITS_BELOW - best.row.need.total / best.row.capacity
    known = any(row.facts.batch_size == size for row in points)
    if known or size <= best.batch_size or (free < CLOSE_ENOUGH and len(points) > 1):
        return dataclasses.replace(best, at_set=at_set and best.batch_size >= size)
    return None


def best_of(points: Sequence[Row]) -> Largest:
    fitting = [row for row in points if row.verdict == FITS]
    best = max(fitting, key=lambda row: row.facts.batch_size, default=None)
    return Largest(best.facts.batch_size if best else 0, best)
