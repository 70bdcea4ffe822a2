"""A ladder of sizes of one config, each compiled for a GPU, and what to change when the largest does not fit.

The rungs come with the recipe (`LADDER`), or are its batch doubled until it no longer fits.
"""

import dataclasses
from collections.abc import Sequence

from jepa_jax.base.errors import UserError
from jepa_jax.config.recipe import LadderStep
from jepa_jax.data.contract import Spec
from jepa_jax.data.facts import bucket_facts, data_facts
from jepa_jax.planning.planner import (
    Changes,
    Estimate,
    Planner,
    batch_change,
    combined_changes,
    enough_parts,
    part_counts,
    single_changes,
)
from jepa_jax.planning.step_compiler import Request

AS_CONFIGURED = LadderStep("as configured", {})
MOST_DOUBLINGS = 10
NOT_THE_MODEL = ("data.batch_size", "train.", "optim.")  # keys of a rung that do not make its model another one


@dataclasses.dataclass(frozen=True)
class Rung:
    """A size of the config.

    Attributes:
        claimed_gb: memory that others publish for it: nothing, one figure, or from and to.
        size: dimensions of the elements that batches are padded to, where the data has several, e.g. "6".
        share: of the elements that need this size; None if it is unknown.
    """

    estimate: Estimate
    claimed_gb: tuple[float, ...] = ()
    size: str = ""
    share: float | None = None

    @property
    def name(self) -> str:
        return self.estimate.label


@dataclasses.dataclass(frozen=True)
class Ladder:
    """Compiled sizes of a config; `retreat` and `sizes` are empty where there is nothing to change or one size."""

    rungs: list[Rung]
    retreat: list[Estimate]  # changes of `top` that need less memory, in the order in which to try them
    sizes: list[Rung]  # some of the rungs at each size of the data's elements

    @property
    def top(self) -> Rung:
        """The rung that needs the most memory."""
        return max(self.rungs, key=lambda rung: rung.estimate.need.total)


def ladder_steps(request: Request, steps: Sequence[LadderStep], sizes_of: str = "") -> list[LadderStep]:
    """Returns the steps of a recipe with the config itself; none if there are none."""
    if not steps:
        return []
    steps = list(steps) if any(not step.changes for step in steps) else [AS_CONFIGURED, *steps]
    for step in steps:
        try:
            request.changed(step.changes)
        except UserError as error:
            raise UserError(f"LADDER, step {step.name!r}: {error}") from error
    _named(sizes_of, [step.name for step in steps])
    return steps


def make_ladder(planner: Planner, request: Request, steps: Sequence[LadderStep], sizes_of: str = "") -> Ladder:
    """Compiles the rungs of a ladder, changes of the largest one, and the sizes of the data.

    Without steps the batch is doubled until it no longer fits. `sizes_of` names the rungs to compile at each size of
    elements, or "all"; by default the first and the largest.
    """
    if steps:
        rows = planner.estimates([_row(request, step.name, step.changes) for step in steps])
        rungs = [Rung(row, step.claimed_gb) for row, step in zip(rows, steps, strict=True)]
    else:
        rungs = _doublings(planner, request)
    top = Ladder(rungs, [], []).top
    named = _named(sizes_of, [rung.name for rung in rungs]) or [rungs[0].name, top.name]
    retreat = _retreat(planner, request, top, rungs)
    return Ladder(rungs, retreat, _sizes(planner, [rung for rung in rungs if rung.name in named]))


def _doublings(planner: Planner, request: Request) -> list[Rung]:
    """Returns the config, and its batch doubled until it no longer fits or exceeds the data."""
    rows = planner.estimates([(request, *AS_CONFIGURED[:2])])
    while rows[-1].fits and 2 * rows[-1].batch_size <= planner.compiler.data.num_train and len(rows) <= MOST_DOUBLINGS:
        rows += planner.estimates([(request, *batch_change(2 * rows[-1].batch_size))])
    return [Rung(row) for row in rows]


def _retreat(planner: Planner, request: Request, top: Rung, rungs: Sequence[Rung]) -> list[Estimate]:
    """Returns changes of a rung that need less memory: batch, accumulation, remat, precision, a smaller model."""

    def changed(steps: Sequence[tuple[str, Changes]]) -> list[Estimate]:
        own = top.estimate.changes
        return planner.possible([_row(request, label, {**own, **changes}) for label, changes in steps])

    def model(rung: Rung) -> Changes:
        return {key: value for key, value in rung.estimate.changes.items() if not key.startswith(NOT_THE_MODEL)}

    def size(rung: Rung) -> int:
        return rung.estimate.facts.parameter_bytes

    at_top, batch = top.estimate.request, top.estimate.batch_size
    parts = (enough_parts(top.estimate) or part_counts(at_top)[-1:])[:1]
    found = changed([batch_change(batch // count) for count in parts] + single_changes(top.estimate, parts))
    if not any(row.fits for row in found):
        found += changed(combined_changes(at_top))
    smaller = [rung for rung in rungs if model(rung) != model(top) and size(rung) < size(top)]
    if smaller:
        next_one = max(smaller, key=size)
        changes = {**next_one.estimate.changes, "data.batch_size": batch}
        found += planner.possible([_row(request, f"model of {next_one.name}", changes)])
    return found


def _sizes(planner: Planner, rungs: Sequence[Rung]) -> list[Rung]:
    """Returns the rungs at each size of elements that their data has; empty if it has one."""
    found, others = [], []
    for rung in rungs:
        own = rung.estimate.request
        # A rung is compiled for the longest element that the config allows, which the data need not have.
        longest = (own.data or planner.compiler.data).spec
        buckets = bucket_facts(own.config.data)
        for label, bucket in zip(size_labels([bucket.spec for bucket in buckets]), buckets, strict=True):
            found.append(dataclasses.replace(rung, size=label, share=bucket.share))
            if dict(bucket.spec) != dict(longest):
                others.append((len(found) - 1, dataclasses.replace(own, elements=bucket.spec)))
    wanted = [(request, found[i].name, found[i].estimate.changes) for i, request in others]
    for (i, _), estimate in zip(others, planner.estimates(wanted), strict=True):
        found[i] = dataclasses.replace(found[i], estimate=estimate)
    return found


def size_labels(specs: Sequence[Spec]) -> list[str]:
    """Returns the dimensions by which elements of ascending size differ, e.g. ["6", "20"] or ["16 x 8", "32 x 16"]."""
    if len(specs) < 2:
        return []
    first, last = specs[0], specs[-1]
    key = next(key for key in last if first[key].shape != last[key].shape)
    axes = [i for i, (a, b) in enumerate(zip(first[key].shape, last[key].shape, strict=True)) if a != b]
    return [" x ".join(str(spec[key].shape[axis]) for axis in axes) for spec in specs]


def mean_samples_per_sec(rows: Sequence[Rung]) -> float | None:
    """Returns the predicted speed if each size has its share of the elements; None if shares are unknown."""
    shares = [row.share for row in rows if row.share is not None]
    if len(shares) < len(rows):
        return None
    return 1 / sum(share / row.estimate.speed.images_per_sec for share, row in zip(shares, rows, strict=True))


def _row(request: Request, label: str, changes: Changes) -> tuple[Request, str, Changes]:
    """Returns what the planner estimates; changes of the data bring the facts of that data along."""
    other = {key: value for key, value in changes.items() if key.startswith("data.") and key != "data.batch_size"}
    data = data_facts(request.changed(other).config.data, assume=True) if other else None
    return dataclasses.replace(request, data=data), label, changes


def _named(text: str, known: list[str]) -> list[str]:
    """Returns the names of the rungs that --sizes_of lists; raises UserError for one that there is not."""
    names = known if text == "all" else [name.strip() for name in text.split(",") if name.strip()]
    if unknown := [name for name in names if name not in known]:
        raise UserError(f"--sizes_of={text}: no rung {unknown[0]!r}; use all or some of {', '.join(known)}")
    return names
