"""Plans as tables, as text for the terminal and as JSON objects."""

import textwrap
from collections.abc import Sequence
from typing import Any, NamedTuple

from jepa_jax.base.text import duration, gib
from jepa_jax.methods.whole_batch import accumulation_effect
from jepa_jax.planning.absent_gpus import num_hosts
from jepa_jax.planning.estimate import FITS_BELOW, verdict_of
from jepa_jax.planning.ladder import Ladder, Rung, mean_samples_per_sec
from jepa_jax.planning.planner import BATCH_GRAIN, Estimate, FailedPlan, Frontier, LargestBatch, Plan
from jepa_jax.planning.run_cost import PlanContext, evaluation_bytes, run_cost
from jepa_jax.program.optim import scaled_learning_rate
from jepa_jax.reports.tables import text_table

FACTS_IN_JSON = (
    "argument_bytes", "temp_bytes", "parameter_bytes", "optimizer_bytes", "target_bytes", "alias_bytes",
    "state_bytes", "collectives", "host_calls",
)  # fmt: skip
FAILED = "does not compile"
WIDTH = 120  # characters of a line of notes on a terminal
ESTIMATE_COLUMNS = ["", "batch", "peak", "needed", "verdict", "samples/s"]


class PlanTable(NamedTuple):
    """A table of a plan, with what it says in words."""

    title: str
    header: list[str]
    rows: list[list[str]]
    note: str = ""


def plan_lines(plan: Plan, context: PlanContext, name: str) -> list[str]:
    """Returns the lines of the whole plan of a config called `name`."""
    blocks = [
        [f"{name} on {plan.request.describe()}"],
        memory_lines(plan, context),
        speed_lines(plan, context),
        *map(table_lines, plan_tables(plan)),
    ]
    return [line for block in blocks if block for line in ("", *block)]


def table_lines(table: PlanTable) -> list[str]:
    cells = text_table([table.header, *table.rows], widest=120).splitlines() if table.rows else []
    return [table.title, *cells, *textwrap.wrap(table.note, WIDTH, break_on_hyphens=False)]


def plan_tables(plan: Plan) -> list[PlanTable]:
    """Returns the tables of a plan: variants, alternatives if it does not fit, frontier and ladder if asked for."""
    tables = [variant_table(plan)]
    if not plan.estimate.fits and plan.largest[0][1].batch_size is not None:
        tables.append(ways_out_table(plan.estimate, plan.ways_out))
    tables += [frontier_table(plan.frontier)] if plan.frontier else []
    return tables + (ladder_tables(plan.ladder) if plan.ladder else [])


def memory_lines(plan: Plan, context: PlanContext) -> list[str]:
    """Returns what a device must hold, part by part, the verdict, and what evaluation needs."""
    estimate, evaluation = plan.estimate, evaluation_bytes(plan, context)
    need, capacity, parts = estimate.need, estimate.capacity, memory_parts(estimate)
    rows = [
        *((name, parts[name]) for name in list(parts)[:-2] if name != "EMA target" or parts[name]),
        ("peak of the compiled step (a lower bound)", need.peak),
        ("data on the device beside it", need.data),
        ("margin: workspace of convolutions", need.workspace),
        ("margin: fragmentation", need.fragmentation),
        ("needed", need.total),
        (f"memory that JAX takes, {100 * plan.request.memory_fraction:.0f} % of the GPU", capacity),
    ]
    limits = f"fits up to {100 * FITS_BELOW:.0f} %, tight up to 100 %"
    lines = [
        "memory of one device",
        *(f"  {label:<44}{gib(size):>14}" for label, size in rows),
        f"verdict: {estimate.verdict} ({100 * need.total / capacity:.0f} % of the memory is needed; {limits})",
        recomputation_text(estimate),
    ]
    if evaluation:
        verdict = verdict_of(evaluation, capacity)
        advice = "" if evaluation <= FITS_BELOW * capacity else "; set config.eval.max_images"
        what = "evaluation (k-NN and probe hold all features on one device)"
        lines.append(f"{what}: {gib(evaluation)}, {verdict}{advice}")
    return lines


def recomputation_text(estimate: Estimate) -> str:
    """Returns whether XLA recomputes to save memory, what that costs and what would be needed without it."""
    if not estimate.facts.recomputed:
        return "XLA keeps everything: with more memory the step would need as much."
    speed = estimate.speed
    cost = 100 * speed.recomputing_seconds / (speed.seconds - speed.recomputing_seconds)
    return (
        f"XLA runs {estimate.facts.recomputed} kernels again to save memory, which costs {cost:.1f} % of time; "
        f"without that the peak would be {gib(estimate.unlimited_peak)} instead of {gib(estimate.need.peak)}."
    )


def variant_table(plan: Plan) -> PlanTable:
    """Returns the variants with their largest batches, and the other batches that were asked for."""
    rows = [[*estimate_cells(estimate), largest_text(largest)] for estimate, largest in plan.largest]
    rows += [[*estimate_cells(estimate), ""] for estimate in plan.batches]
    note = accumulation_note(plan.estimate, [estimate for estimate, _ in plan.largest])
    return PlanTable("variants", [*ESTIMATE_COLUMNS, "largest batch"], rows, note)


def accumulation_note(base: Estimate, changed: Sequence[Estimate]) -> str:
    """Returns what accumulation changes, if any of the estimates accumulates in other parts than the base."""
    parts = {estimate.request.config.train.accum_steps for estimate in (base, *changed)}
    return f" {accumulation_effect(base.request.config)}" if len(parts) > 1 else ""


def largest_text(largest: LargestBatch) -> str:
    if largest.batch_size is None:
        return "not searched"
    if not largest.batch_size:
        return "none"
    return f"{largest.batch_size:,}" + (" (all data)" if largest.at_set else "")


def ways_out_table(estimate: Estimate, ways: Sequence[Estimate]) -> PlanTable:
    """Returns the changes that make a config fit, with the flags that make them."""
    if not ways:
        note = f"No alternative was found: not even {BATCH_GRAIN} samples per device fit. "
        return PlanTable("ways out", [], [], note + "Use more devices with config.mesh.fsdp, or a smaller model.")
    note = "Each was compiled and fits: the fastest first, then another GPU."
    return changes_table("ways out", estimate, ways, note)


def changes_table(title: str, base: Estimate, changed: Sequence[Estimate], note: str) -> PlanTable:
    """Returns changes of an estimate with the flags that make them."""
    rows = [[*estimate_cells(row), flags(row)] for row in changed]
    return PlanTable(title, [*ESTIMATE_COLUMNS, "flags"], rows, note + accumulation_note(base, changed))


def speed_lines(plan: Plan, context: PlanContext) -> list[str]:
    """Returns the predicted speed, length and price of the whole run, and what the loader must deliver."""
    facts, speed, gpu, cost = plan.estimate.facts, plan.estimate.speed, plan.request.gpu, run_cost(plan, context)
    low, high = speed.predicted
    parts = sorted(speed.parts.items(), key=lambda part: -part[1])
    assumed = "" if context.data.found else " (size of the data assumed: it is not there)"
    hour, (cheap, dear), (fast, slow) = context.price_of(gpu), cost.prices, map(duration, cost.seconds)
    money = f", {cheap:,.2f} to {dear:,.2f} at {hour:g} per hour and GPU" if hour else ""
    run_parts = ", ".join(f"{name} {duration(seconds)}" for name, seconds in cost.parts.items() if seconds)
    return [
        f"per step: {facts.flops / 1e12:,.2f} TFLOP, {facts.bytes_moved * facts.devices / 1e9:,.1f} GB moved; "
        f"{1e3 * speed.seconds:,.1f} ms: " + ", ".join(f"{name} {1e3 * part:,.1f}" for name, part in parts),
        f"predicted: {speed.images_per_sec:,.0f} samples/s ({low:,.0f} to {high:,.0f}); {speed.error_text}",
        f"bound: {speed.bound_images_per_sec:,.0f} samples/s if every kernel reached the peak rates of a {gpu.name}",
        f"whole run: {cost.steps:,} steps in {fast} to {slow}{money}{assumed}",
        f"  of which: {run_parts}",
        _loader_line(plan, context),
    ]


def _loader_line(plan: Plan, context: PlanContext) -> str:
    if plan.request.config.data.pipeline == "device":
        return "loader: none, the data set is on the device (data.pipeline = device)"
    hosts, rate = num_hosts(plan.request.topology), context.loader_images_per_sec
    needed = plan.estimate.speed.images_per_sec / hosts
    where = " on each host" if hosts > 1 else ""
    text = f"loader: must deliver {needed:,.0f} samples/s{where} to keep up with the prediction"
    if rate is None:
        return f"{text}; not measured here ({context.loader_note})"
    verdict = "enough" if rate >= needed else f"{100 * rate / needed:.0f} % of that: the loader would set the speed"
    return f"{text}; measured on this machine: {rate:,.0f}, {verdict}"


def frontier_table(frontier: Frontier) -> PlanTable:
    """Returns the combinations, those that none beats marked, and the advice."""
    base, best = frontier.points[0], frontier.best
    rows = []
    for point in sorted(frontier.points, key=lambda point: -point.need.total):
        slower = 100 * (base.speed.images_per_sec / point.speed.images_per_sec - 1)
        rows.append([*estimate_cells(point), f"{slower:+.1f} %", "*" if point in best else ""])
    note = "none of them needs so little: use a smaller batch or model, or a larger budget"
    if advice := frontier.advice:
        note = f"{accumulation_note(base, frontier.points)} advice: {advice.label}: {flags(advice)}".strip()
    title = f"memory against predicted time, budget {gib(frontier.budget_bytes)} (* none is better in both)"
    return PlanTable(title, [*ESTIMATE_COLUMNS, "time", "*"], rows, note)


def flags(estimate: Estimate) -> str:
    values = {key: value for key, value in estimate.changes.items() if key != "gpu"}
    text = {key: ",".join(map(str, v)) if isinstance(v, tuple | list) else str(v) for key, v in values.items()}
    return " ".join(f"--config.{key}={value}" for key, value in text.items())


def estimate_cells(estimate: Estimate) -> list[str]:
    again = ", XLA recomputes" if estimate.facts.recomputed else ""
    return [
        estimate.label, f"{estimate.batch_size:,}", gib(estimate.need.peak), gib(estimate.need.total),
        estimate.verdict + again, f"{estimate.speed.images_per_sec:,.0f}",
    ]  # fmt: skip


def memory_parts(estimate: Estimate) -> dict[str, int]:
    """Returns the bytes that one device must hold, by what they are; together they are the need."""
    facts, need = estimate.facts, estimate.need
    own = {"parameters": facts.parameter_bytes, "optimizer": facts.optimizer_bytes, "EMA target": facts.target_bytes}
    rest = max(0, facts.argument_bytes - sum(own.values()))
    return {
        **own,
        "batch and statistics": rest,
        "activations, gradients, temporaries": need.peak - sum(own.values()) - rest,
        "data beside it": need.data,
        "margin": need.margin,
    }


def ladder_tables(ladder: Ladder) -> list[PlanTable]:
    """Returns the tables of a ladder: memory, speed and rates, what to change, sizes; those without rows left out."""
    top = ladder.top.estimate
    state = "needs the most of all rungs" if top.fits else "does not fit"
    note = f"Changes of {top.label!r}, which {state}, in the order in which to try them."
    retreat = changes_table("when memory runs out", top, ladder.retreat, note)
    tables = [_memory_table(ladder.rungs), _rung_table(ladder.rungs), retreat, _size_table(ladder.sizes)]
    return [table for table in tables if table.rows]


def _memory_table(rungs: Sequence[Rung]) -> PlanTable:
    parts = [name for name in memory_parts(rungs[0].estimate) if any(memory_parts(r.estimate)[name] for r in rungs)]
    rows = [
        [rung.name, *(gib(memory_parts(rung.estimate)[name]) for name in parts), gib(rung.estimate.need.total)]
        + ["-".join(f"{figure:g}" for figure in rung.claimed_gb), rung.estimate.verdict]
        for rung in rungs
    ]
    note = (
        f"Per device, of {gib(rungs[0].estimate.capacity)}. The margin is an assumption (docs/guides/plan.md); claimed "
        "are GB as published by others for their own program."
    )
    return PlanTable("memory of each rung", ["rung", *parts, "needed", "claimed", "verdict"], rows, note)


def _rung_table(rungs: Sequence[Rung]) -> PlanTable:
    rows = []
    for rung in rungs:
        estimate, flops = rung.estimate, rung.estimate.facts.flops
        low, high = estimate.speed.predicted
        rows.append(
            [rung.name, f"{estimate.batch_size:,}", f"{flops / 1e12:,.2f}", f"{flops / estimate.batch_size / 1e9:,.2f}"]
            + [f"{estimate.speed.images_per_sec:,.0f}", f"{low:,.0f}-{high:,.0f}", estimate.speed.limit]
            + [f"{rate:.3g}" for rate in learning_rates(estimate).values()]
        )
    header = ["rung", "batch", "TFLOP per step", "GFLOP per sample", "samples/s", "range", "most time"]
    note = (
        "Rates are rules of thumb, not computed from the model: linear scaling from optim.reference_batch is customary "
        "with SGD, square-root scaling with Adam (--config.optim.batch_scaling). jepa-jax lr-search measures."
    )
    return PlanTable("speed and rates", [*header, "rate of the config", "linear", "square root"], rows, note)


def _size_table(sizes: Sequence[Rung]) -> PlanTable:
    rows, note = [], "Memory and time of a batch follow its longest element; batches are padded to one of these."
    for name in dict.fromkeys(row.name for row in sizes):
        own = [row for row in sizes if row.name == name]
        for row in own:
            share = "unknown" if row.share is None else f"{100 * row.share:.0f} %"
            rows.append([*estimate_cells(row.estimate), row.size, share])
        mean, longest = mean_samples_per_sec(own), own[-1].estimate.speed.images_per_sec
        if mean is not None:
            note += (
                f" {name}: with every batch at its own size {mean:,.0f} samples/s are predicted, with all padded to "
                f"{own[-1].size} {longest:,.0f} ({mean / longest:.2f} times)."
            )
    return PlanTable("effect of the longest element", [*ESTIMATE_COLUMNS, "longest", "elements"], rows, note)


def learning_rates(estimate: Estimate) -> dict[str, float]:
    """Returns the peak rates for the batch of an estimate: as the config scales them, and by both rules of thumb."""
    optim = estimate.request.config.optim
    rules = {"config": optim.batch_scaling, "linear": "linear", "sqrt": "sqrt"}
    return {
        name: scaled_learning_rate(optim.lr, estimate.batch_size, rule, optim.reference_batch)
        for name, rule in rules.items()
    }


def ladder_json(ladder: Ladder) -> dict[str, Any]:
    """Returns a ladder as a JSON object of three lists of rows."""
    rungs = [(row.estimate, {"claimed_gb": list(row.claimed_gb)}) for row in ladder.rungs]
    return {
        "rungs": [row_json(one) | claimed | {"learning_rates": learning_rates(one)} for one, claimed in rungs],
        "out_of_memory": [row_json(row) for row in ladder.retreat],
        "sizes": [row_json(row.estimate) | {"size": row.size, "share": row.share} for row in ladder.sizes],
    }


def plan_json(plan: Plan, context: PlanContext) -> dict[str, Any]:
    """Returns the plan as a JSON object; bytes and operations are per step, memory is per device."""
    estimate, facts = plan.estimate, plan.estimate.facts
    cost = run_cost(plan, context)
    return {
        "gpu": plan.request.gpu.key,
        "topology": plan.request.topology,
        **row_json(estimate),
        **{name: getattr(facts, name) for name in FACTS_IN_JSON},
        "capacity_bytes": estimate.capacity,
        "margin_bytes": estimate.need.margin,
        "fits": estimate.fits,
        "largest_batch": plan.largest[0][1].batch_size,
        "bytes_per_step": facts.bytes_moved * facts.devices,
        "unlimited_peak_bytes": estimate.unlimited_peak,
        "recomputing_seconds": estimate.speed.recomputing_seconds,
        "images_per_sec_predicted": list(estimate.speed.predicted),
        "prediction_median_error": estimate.speed.factors.median_error,
        "prediction_p90_error": estimate.speed.factors.p90_error,
        "seconds_by_part": dict(estimate.speed.parts),
        "limit": estimate.speed.limit,
        "encoder_float32_products": len(facts.encoder_float32_products),
        "evaluation_bytes": evaluation_bytes(plan, context),
        "steps": cost.steps,
        "run_seconds_predicted": list(cost.seconds),
        "run_seconds_by_part": cost.parts,
        "price_predicted": list(cost.prices) if context.price_of(plan.request.gpu) else None,
        "loader_images_per_sec": context.loader_images_per_sec,
        "variants": [{**row_json(row), "largest_batch": largest.batch_size} for row, largest in plan.largest],
        "batches": [row_json(row) for row in plan.batches],
        "ways_out": [row_json(row) for row in plan.ways_out],
        **({"frontier": [row_json(row) for row in plan.frontier.points]} if plan.frontier else {}),
        **({"ladder": ladder_json(plan.ladder)} if plan.ladder else {}),
    }


def failed_json(failed: FailedPlan) -> dict[str, Any]:
    request = failed.request
    what = {"gpu": request.gpu.key, "topology": request.topology, "batch_size": request.config.data.batch_size}
    return what | {"capacity_bytes": request.pool_bytes, "verdict": FAILED, "fits": False, "error": failed.reason}


def row_json(estimate: Estimate) -> dict[str, Any]:
    return {
        "label": estimate.label,
        "changes": estimate.changes,
        "batch_size": estimate.batch_size,
        "peak_bytes": estimate.facts.peak_bytes,
        "needed_bytes": estimate.need.total,
        "verdict": estimate.verdict,
        "flops_per_step": estimate.facts.flops,
        "images_per_sec": estimate.speed.images_per_sec,
        "images_per_sec_bound": estimate.speed.bound_images_per_sec,
        "recomputed_kernels": estimate.facts.recomputed,
    }
