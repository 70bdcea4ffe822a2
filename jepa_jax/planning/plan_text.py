"""Plans as text for the terminal and as JSON objects."""

from collections.abc import Sequence
from typing import Any

from jepa_jax.base.text import duration, gib
from jepa_jax.planning.absent_gpus import num_hosts
from jepa_jax.planning.estimate import FITS_BELOW, Estimate
from jepa_jax.planning.largest_batch import BATCH_GRAIN, LargestBatch
from jepa_jax.planning.planner import Plan
from jepa_jax.planning.run_cost import PlanContext, evaluation_bytes, evaluation_lines, run_cost
from jepa_jax.planning.step_facts import StepFacts
from jepa_jax.runtime.allocator import POOL_FRACTION, POOL_VARIABLE

FACTS_IN_JSON = (
    "peak_bytes", "argument_bytes", "temp_bytes", "parameter_bytes", "optimizer_bytes", "target_bytes", "alias_bytes",
    "state_bytes", "collectives", "host_calls",
)  # fmt: skip
ACCUMULATION = "Accumulation keeps the batch; losses and norms over a batch see one part at a time."


def plan_lines(plan: Plan, context: PlanContext, name: str) -> list[str]:
    """Returns the lines of the whole plan of a config called `name`."""
    estimate = plan.estimate
    lines = [
        "",
        f"{name} on {plan.request.describe()}",
        "",
        *memory_lines(estimate),
        *evaluation_lines(plan, context),
        "",
        *explanation_lines(estimate.facts),
        "",
        *table_lines(plan),
        "",
        *speed_lines(plan, context),
    ]
    advice = pool_lines(estimate) if estimate.fits else ways_out_lines(plan.ways_out)
    return [*lines, "", *advice] if advice else lines


def memory_lines(estimate: Estimate) -> list[str]:
    """Returns what a device must hold, part by part, and the verdict."""
    facts, need = estimate.facts, estimate.need
    rest = facts.argument_bytes - facts.parameter_bytes - facts.optimizer_bytes - facts.target_bytes
    parts = [
        ("parameters", facts.parameter_bytes),
        ("optimizer", facts.optimizer_bytes),
        *([("EMA target", facts.target_bytes)] if facts.target_bytes else []),
        ("batch and statistics", rest),
        ("activations, gradients, temporaries", facts.peak_bytes - facts.argument_bytes),
        ("peak of the compiled step (a lower bound)", need.peak),
        ("data on the device beside it", need.data),
        ("margin: CUDA context and libraries", need.context),
        ("margin: workspace of convolutions", need.workspace),
        *([("margin: buffers of collectives", need.collectives)] if need.collectives else []),
        ("margin: fragmentation", need.fragmentation),
        ("needed", need.total),
        ("memory of the GPU", estimate.capacity),
    ]
    share = 100 * need.total / estimate.capacity
    limits = f"fits up to {100 * FITS_BELOW:.0f} %, tight up to 100 %"
    return [
        "memory of one device",
        *(f"  {label:<44}{gib(size):>14}" for label, size in parts),
        f"verdict: {estimate.verdict} ({share:.0f} % of the memory is needed; {limits})",
        *recomputation_lines(estimate),
    ]


def recomputation_lines(estimate: Estimate) -> list[str]:
    """Returns whether XLA recomputes to save memory, what that costs and what would be needed without it."""
    if not estimate.facts.recomputed:
        return ["XLA keeps everything: with more memory the step would need as much."]
    speed = estimate.speed
    cost = 100 * speed.recomputing_seconds / (speed.seconds - speed.recomputing_seconds)
    line = f"XLA runs {estimate.facts.recomputed} kernels again to save memory, which costs {cost:.1f} % of time"
    if estimate.unlimited is None:
        return [f"{line}."]
    kept = f"without that the peak would be {gib(estimate.unlimited_peak)} instead of {gib(estimate.need.peak)}"
    return [f"{line}; {kept}."]


def explanation_lines(facts: StepFacts) -> list[str]:
    """Returns in words what the peak consists of and which changes reduce it."""
    peak = max(1, facts.peak_bytes)
    activations = 100 * max(0, peak - facts.argument_bytes - facts.parameter_bytes) / peak
    state, gradients = 100 * facts.state_bytes / peak, 100 * facts.parameter_bytes / peak
    held_twice = facts.state_bytes - facts.alias_bytes
    return [
        f"{activations:.0f} % of the peak are activations kept for the backward pass and temporaries: they grow with",
        "the batch and shrink with remat (recomputed), accumulation (a part at a time) and more devices.",
        f"{state:.0f} % are parameters, optimizer and statistics, about {gradients:.0f} % gradients: "
        "only FSDP over several devices divides them.",
        f"{gib(held_twice)} of the state are not donated: they are held twice."
        if held_twice > 0
        else "The new state reuses the memory of the old one (donated).",
        *(f"{kind}: {n:,} per step, {gib(sent)} sent by each device" for kind, (n, sent) in facts.collectives.items()),
    ]


def table_lines(plan: Plan) -> list[str]:
    """Returns a table of the variants with their largest batches, and of the other batches that were asked for."""
    lines = [f"{'':<28}{'batch':>8}{'peak':>12}{'needed':>12}  {'verdict':<14}{'samples/s':>12}  largest batch"]
    lines += [f"{_row(estimate)}  {largest_text(largest)}" for estimate, largest in plan.largest]
    lines += [_row(estimate) for estimate in plan.batches]
    if any("train.accum_steps" in estimate.changes for estimate, _ in plan.largest):
        lines.append(ACCUMULATION)
    others = [largest.estimate for _, largest in plan.largest if largest.estimate] + plan.batches
    if any(pool_lines(estimate) for estimate in others):
        lines.append(
            f"Batches that need more than the {100 * POOL_FRACTION:.0f} % of the memory that JAX takes, such as the "
            f"largest ones, need {POOL_VARIABLE}=0.95 in the environment."
        )
    return lines


def _row(estimate: Estimate) -> str:
    return (
        f"{estimate.label:<28}{estimate.batch_size:>8,}{gib(estimate.need.peak):>12}"
        f"{gib(estimate.need.total):>12}  {estimate.verdict:<14}{estimate.speed.images_per_sec:>12,.0f}"
        + ("  (XLA recomputes)" if estimate.facts.recomputed else "")
    )


def largest_text(largest: LargestBatch) -> str:
    """Returns a largest batch as text."""
    if not largest.searched:
        return "not searched"
    if not largest.batch_size:
        return "none"
    return f"{largest.batch_size:,}" + (" (all data)" if largest.at_set else "")


def largest_json(largest: LargestBatch) -> int | None:
    """Returns a largest batch as JSON: 0 if nothing fits, null if it was not looked for."""
    return largest.batch_size if largest.searched else None


def ways_out_lines(ways: Sequence[Estimate]) -> list[str]:
    """Returns the changes that make a config fit, with the flags that make them."""
    if not ways:
        return [
            f"No alternative was found: not even {BATCH_GRAIN} samples per device fit. "
            "Use more devices with config.mesh.fsdp, or a smaller model."
        ]
    lines = ["alternatives that fit, each compiled: the fastest first, then another GPU:"]
    for way in ways:
        lines.append(
            f"  {way.label:<32}{gib(way.need.total):>12}  {way.verdict:<6} {way.speed.images_per_sec:>9,.0f} samples/s"
        )
        flags = [f"--config.{key}={value}" for key, value in way.changes.items() if key != "gpu"]
        lines += [f"      {' '.join(flags)}"] if flags else []
    if any("train.accum_steps" in way.changes for way in ways):
        lines.append(ACCUMULATION)
    return lines


def pool_lines(estimate: Estimate, fraction: float = POOL_FRACTION) -> list[str]:
    """Returns what to set if JAX, which takes `fraction` of the memory, takes too little; otherwise nothing."""
    if estimate.need.pool <= fraction * estimate.capacity:
        return []
    enough = min(0.95, -(-estimate.need.pool * 100 // estimate.capacity) / 100 + 0.02)
    return [
        f"JAX takes {100 * fraction:.0f} % of the memory, less than this step needs: set {POOL_VARIABLE}={enough:.2f}"
    ]


def speed_lines(plan: Plan, context: PlanContext) -> list[str]:
    """Returns the predicted speed, what the whole run would take, and what the loader must deliver."""
    facts, speed, gpu = plan.estimate.facts, plan.estimate.speed, plan.request.gpu
    low, high = speed.predicted
    parts = sorted(speed.parts.items(), key=lambda part: -part[1])
    return [
        f"per step: {facts.flops / 1e12:,.2f} TFLOP, {facts.bytes_moved * facts.devices / 1e9:,.1f} GB moved; "
        f"{1e3 * speed.seconds:,.1f} ms: " + ", ".join(f"{name} {1e3 * part:,.1f}" for name, part in parts),
        f"predicted: {speed.images_per_sec:,.0f} samples/s ({low:,.0f} to {high:,.0f}); {speed.error_text}",
        f"bound: {speed.bound_images_per_sec:,.0f} samples/s if every kernel reached the peak rates of a {gpu.name}",
        *run_lines(plan, context),
        _loader_line(plan, context),
    ]


def run_lines(plan: Plan, context: PlanContext) -> list[str]:
    """Returns the length and price of the whole run."""
    cost = run_cost(plan, context)
    assumed = "" if context.data.found else " (size of the data assumed: it is not there)"
    money = ""
    if hour := context.price_of(plan.request.gpu):
        low, high = cost.prices
        money = f", {low:,.2f} to {high:,.2f} at {hour:g} per hour and GPU"
    fast, slow = (duration(seconds) for seconds in cost.seconds)
    parts = ", ".join(f"{name} {duration(seconds)}" for name, seconds in cost.parts.items() if seconds)
    return [f"whole run: {cost.steps:,} steps in {fast} to {slow}{money}{assumed}", f"  of which: {parts}"]


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


def plan_json(plan: Plan, context: PlanContext) -> dict[str, Any]:
    """Returns the plan as a JSON object; bytes and operations are per step, memory is per device."""
    estimate, facts = plan.estimate, plan.estimate.facts
    cost = run_cost(plan, context)
    return {
        "gpu": plan.request.gpu.key,
        "topology": plan.request.topology,
        "batch_size": estimate.batch_size,
        **{name: getattr(facts, name) for name in FACTS_IN_JSON},
        "capacity_bytes": estimate.capacity,
        "needed_bytes": estimate.need.total,
        "margin_bytes": estimate.need.margin,
        "verdict": estimate.verdict,
        "fits": estimate.fits,
        "largest_batch": largest_json(plan.largest[0][1]),
        "flops_per_step": facts.flops,
        "bytes_per_step": facts.bytes_moved * facts.devices,
        "unlimited_peak_bytes": estimate.unlimited_peak,
        "recomputed_kernels": facts.recomputed,
        "recomputing_seconds": estimate.speed.recomputing_seconds,
        "images_per_sec": estimate.speed.images_per_sec,
        "images_per_sec_bound": estimate.speed.bound_images_per_sec,
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
        "variants": [{**row_json(row), "largest_batch": largest_json(largest)} for row, largest in plan.largest],
        "batches": [row_json(row) for row in plan.batches],
        "ways_out": [row_json(row) for row in plan.ways_out],
    }


def row_json(estimate: Estimate) -> dict[str, Any]:
    """Returns an estimate as a JSON object."""
    return {
        "label": estimate.label,
        "changes": estimate.changes,
        "batch_size": estimate.batch_size,
        "peak_bytes": estimate.facts.peak_bytes,
        "needed_bytes": estimate.need.total,
        "verdict": estimate.verdict,
        "images_per_sec": estimate.speed.images_per_sec,
        "images_per_sec_bound": estimate.speed.bound_images_per_sec,
        "recomputed_kernels": estimate.facts.recomputed,
    }
