"""Shows how far a config scales on a GPU: a ladder of sizes, each compiled, and what to change when one does not fit.

A ladder comes with the recipe (`LADDER`), or is the batch doubled until it no longer fits. Every row is an estimate of
the planner; only the rates are rules of thumb.
"""

import dataclasses
from collections.abc import Callable, Sequence

from jepa_jax.base.console import Console
from jepa_jax.base.errors import UserError
from jepa_jax.config.groups import Config, DataConfig
from jepa_jax.config.recipe import LadderStep
from jepa_jax.data.contract import Spec
from jepa_jax.data.facts import BucketFacts, DataFacts, bucket_facts, data_facts
from jepa_jax.planning.estimate import Estimate
from jepa_jax.planning.planner import (
    Changes,
    Planner,
    accumulation,
    batch_change,
    combined_changes,
    enough_parts,
    part_counts,
    remat,
)
from jepa_jax.planning.step_compiler import Request, StepCompiler, default_folder
from jepa_jax.program.optim import scaled_learning_rate
from jepa_jax.runtime.hardware import find_gpus, load_table

AS_CONFIGURED = LadderStep("as configured", {})
MOST_DOUBLINGS = 10
NOT_THE_MODEL = ("data.batch_size", "train.", "optim.")  # keys of a rung that do not make its model another one


@dataclasses.dataclass(frozen=True)
class GuideOptions:
    """The flags of `jepa-jax scale-guide`."""

    gpu: str = "rtx4090"
    topology: str = "1x1x1"
    gpu_table: str = ""
    sizes_of: str = ""  # names of rungs, separated by commas, or "all"


@dataclasses.dataclass(frozen=True)
class Rung:
    """A size of the config, and the memory in GB that others claim for it: nothing, one figure, or from and to."""

    estimate: Estimate
    claimed_gb: tuple[float, ...] = ()

    @property
    def name(self) -> str:
        return self.estimate.label


@dataclasses.dataclass(frozen=True)
class SizeRow:
    """A rung whose batches are padded to one of the sizes of the data; `share` of the elements need that size."""

    rung: str
    size: str  # the dimensions that differ, e.g. "6"
    share: float | None  # None if it is unknown
    estimate: Estimate


@dataclasses.dataclass(frozen=True)
class Rates:
    """Peak learning rates for a batch: as the config scales them, and by both rules of thumb."""

    batch_size: int
    configured: float
    linear: float
    sqrt: float


@dataclasses.dataclass(frozen=True)
class ScaleGuide:
    """A ladder of compiled sizes; `retreat` and `sizes` are empty where there is nothing to change or one size."""

    rungs: list[Rung]
    retreat: list[Estimate]  # changes of `top` that need less memory, in the order in which to try them
    rates: list[Rates]
    sizes: list[SizeRow]

    @property
    def configured(self) -> Rung:
        """The config as it is."""
        return next(rung for rung in self.rungs if not rung.estimate.changes)

    @property
    def top(self) -> Rung:
        """The rung that needs the most memory."""
        return top_of(self.rungs)


def make_guide(
    config: Config,
    ladder: Sequence[LadderStep],
    options: GuideOptions,
    console: Console,
    make_compiler: Callable[[DataFacts], StepCompiler] | None = None,
) -> ScaleGuide:
    """Compiles the rungs of a ladder for a GPU, changes of the largest one, and the sizes of the data.

    Args:
        config: what the steps of the ladder change.
        ladder: its steps; if empty, the batch is doubled until it no longer fits.
        options: the GPU.
        console: is told about compilations.
        make_compiler: of data; by default a StepCompiler that keeps its plans.
    """
    table = load_table(options.gpu_table or None)
    gpus = find_gpus([options.gpu], table)
    if len(gpus) > 1:
        raise UserError(f"--gpu={options.gpu}: a guide is for one GPU; name one")
    request = Request(config, gpus[0], options.topology)
    has_config = not ladder or any(not step.changes for step in ladder)
    steps = list(ladder) if has_config else [AS_CONFIGURED, *ladder]
    check_steps(request, steps)
    if steps:
        sized_names(options.sizes_of, [step.name for step in steps])

    def compiler(data: DataFacts) -> StepCompiler:
        return StepCompiler(data, default_folder(), on_compile=lambda what: console.line(f"compiling for {what}"))

    planner = LadderPlanner(request, lambda data: Planner((make_compiler or compiler)(data), table))
    rungs = planner.rungs(steps) if steps else planner.doublings()
    top = top_of(rungs)
    sized = sized_names(options.sizes_of, [rung.name for rung in rungs]) or [rungs[0].name, top.name]
    retreat = planner.retreat(top, rungs)
    batches = {row.batch_size for row in [*(rung.estimate for rung in rungs), *retreat]}
    sizes = planner.sizes([rung for rung in rungs if rung.name in sized])
    return ScaleGuide(rungs, retreat, [rates(config, size) for size in sorted(batches)], sizes)


def check_steps(request: Request, steps: Sequence[LadderStep]) -> None:
    """Raises UserError for a step of a ladder that is no valid config, before anything is compiled."""
    for step in steps:
        try:
            request.changed(step.changes)
        except UserError as error:
            raise UserError(f"LADDER, step {step.name!r}: {error}") from error


class LadderPlanner:
    """Estimates changes of one request; those that change the data are planned with the facts of that data."""

    def __init__(self, request: Request, planner_of: Callable[[DataFacts], Planner]):
        self._request, self._planner_of = request, planner_of
        self._planners: dict[DataConfig, Planner] = {}
        self._bucket_facts: dict[DataConfig, list[BucketFacts]] = {}

    def rungs(self, steps: Sequence[LadderStep]) -> list[Rung]:
        """Returns the rungs of the steps of a ladder."""
        estimates = self._estimates([(step.name, step.changes, None) for step in steps])
        return [Rung(estimate, step.claimed_gb) for estimate, step in zip(estimates, steps, strict=True)]

    def doublings(self) -> list[Rung]:
        """Returns the config, and its batch doubled until it no longer fits or exceeds the data."""
        num_train = self._planner({}).compiler.data.num_train
        rows = self._estimates([(*AS_CONFIGURED[:2], None)])
        while rows[-1].fits and 2 * rows[-1].batch_size <= num_train and len(rows) <= MOST_DOUBLINGS:
            rows += self._estimates([(*batch_change(2 * rows[-1].batch_size), None)])
        return [Rung(row) for row in rows]

    def retreat(self, top: Rung, rungs: Sequence[Rung]) -> list[Estimate]:
        """Returns changes of a rung that need less memory: batch, accumulation, remat, precision, model."""
        steps = retreat_steps(top.estimate)
        found = self._changed(top, steps)
        if not any(row.fits for row in found):
            found += self._changed(top, combined_changes(top.estimate.request))
        model = smaller_model(top, rungs)
        return found + (self._estimates([(*model, None)]) if model else [])

    def sizes(self, rungs: Sequence[Rung]) -> list[SizeRow]:
        """Returns the rungs at each size of batches that their data has; empty if it has one."""
        buckets = {rung.name: self._buckets(rung.estimate.changes) for rung in rungs}

        def is_compiled(rung: Rung, bucket: BucketFacts) -> bool:
            # A rung is compiled for the longest element that the config allows, which the data need not have.
            return dict(bucket.spec) == dict(self._planner(rung.estimate.changes).compiler.data.spec)

        others = [(rung, one) for rung in rungs for one in buckets[rung.name] if not is_compiled(rung, one)]
        wanted = [(rung.name, rung.estimate.changes, bucket.spec) for rung, bucket in others]
        estimates = iter(self._estimates(wanted))
        rows = []
        for rung in rungs:
            own = buckets[rung.name]
            labels = size_labels([bucket.spec for bucket in own])
            padded = [rung.estimate if is_compiled(rung, bucket) else next(estimates) for bucket in own]
            rows += [
                SizeRow(rung.name, label, bucket.share, estimate)
                for label, bucket, estimate in zip(labels, own, padded, strict=True)
            ]
        return rows

    def _changed(self, top: Rung, steps: Sequence[tuple[str, Changes]]) -> list[Estimate]:
        return self._estimates([(label, {**top.estimate.changes, **changes}, None) for label, changes in steps])

    def _estimates(self, wanted: Sequence[tuple[str, Changes, Spec | None]]) -> list[Estimate]:
        """Returns estimates of labelled changes with elements of a bucket (None: the largest), in their order."""
        planners = [self._planner(changes) for _, changes, _ in wanted]
        found: dict[int, Estimate] = {}
        for planner in dict.fromkeys(planners):
            own = [i for i, each in enumerate(planners) if each is planner]
            requests = [dataclasses.replace(self._request, elements=wanted[i][2]) for i in own]
            rows = planner.estimates([(request, *wanted[i][:2]) for request, i in zip(requests, own, strict=True)])
            found |= dict(zip(own, rows, strict=True))
        return [found[i] for i in range(len(wanted))]

    def _planner(self, changes: Changes) -> Planner:
        data = self._data(changes)
        if data not in self._planners:
            self._planners[data] = self._planner_of(data_facts(data, assume=True))
        return self._planners[data]

    def _buckets(self, changes: Changes) -> list[BucketFacts]:
        data = self._data(changes)
        if data not in self._bucket_facts:
            self._bucket_facts[data] = bucket_facts(data)
        return self._bucket_facts[data]

    def _data(self, changes: Changes) -> DataConfig:
        """Returns the data of a rung, whatever its batch: facts of a data set take time to find."""
        other = {key: value for key, value in changes.items() if key.startswith("data.") and key != "data.batch_size"}
        return self._request.changed(other).config.data


def sized_names(text: str, known: list[str]) -> list[str]:
    """Returns the names of the rungs that --sizes_of lists; raises UserError for one that there is not."""
    names = known if text == "all" else [name.strip() for name in text.split(",") if name.strip()]
    if unknown := [name for name in names if name not in known]:
        raise UserError(f"--sizes_of={text}: no rung {unknown[0]!r}; use all or some of {', '.join(known)}")
    return names


def top_of(rungs: Sequence[Rung]) -> Rung:
    """Returns the rung that needs the most memory."""
    return max(rungs, key=lambda rung: rung.estimate.need.total)


def retreat_steps(top: Estimate) -> list[tuple[str, Changes]]:
    """Returns single changes that make an estimate need less, with as many parts as it seems to take to fit."""
    request = top.request
    parts = (enough_parts(top) or part_counts(request)[-1:])[:1]
    steps = [batch_change(top.batch_size // count) for count in parts]
    steps += accumulation(request, parts) + remat(request)
    if request.config.train.precision == "float32":
        steps.append(("bfloat16", {"train.precision": "bfloat16"}))
    return steps


def smaller_model(top: Rung, rungs: Sequence[Rung]) -> tuple[str, Changes] | None:
    """Returns the next smaller model of the ladder at the batch of its largest rung; None if there is no other."""

    def model(rung: Rung) -> Changes:
        return {key: value for key, value in rung.estimate.changes.items() if not key.startswith(NOT_THE_MODEL)}

    def size(rung: Rung) -> int:
        return rung.estimate.facts.parameter_bytes

    smaller = [rung for rung in rungs if model(rung) != model(top) and size(rung) < size(top)]
    if not smaller:
        return None
    largest = max(smaller, key=size)
    return f"model of {largest.name}", {**largest.estimate.changes, "data.batch_size": top.estimate.batch_size}


def size_labels(specs: Sequence[Spec]) -> list[str]:
    """Returns the dimensions by which elements of ascending size differ, e.g. ["6", "20"] or ["16 x 8", "32 x 16"]."""
    if len(specs) < 2:
        return []
    first, last = specs[0], specs[-1]
    key = next(key for key in last if first[key].shape != last[key].shape)
    axes = [i for i, (a, b) in enumerate(zip(first[key].shape, last[key].shape, strict=True)) if a != b]
    return [" x ".join(str(spec[key].shape[axis]) for axis in axes) for spec in specs]


def mean_samples_per_sec(rows: Sequence[SizeRow]) -> float | None:
    """Returns the predicted speed if each size has its share of the elements; None if shares are unknown."""
    shares = [row.share for row in rows if row.share is not None]
    if len(shares) < len(rows):
        return None
    return 1 / sum(share / row.estimate.speed.images_per_sec for share, row in zip(shares, rows, strict=True))


def rates(config: Config, batch_size: int) -> Rates:
    """Returns the peak rates of a batch, from `optim.lr` at `optim.reference_batch`."""
    optim = config.optim
    peaks = [
        scaled_learning_rate(optim.lr, batch_size, rule, optim.reference_batch)
        for rule in (optim.batch_scaling, "linear", "sqrt")
    ]
    return Rates(batch_size, *peaks)
