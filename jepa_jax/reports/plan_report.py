"""A plan for people and programs: lines of text, a JSON object, a page."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jepa_jax.data.facts import DataFacts
from jepa_jax.planning.planner import (
    BATCH_GRAIN,
    EFFICIENCY,
    FITS_BELOW,
    GIB,
    NO,
    Largest,
    Plan,
    Row,
)
from jepa_jax.program.build import Length
from jepa_jax.runtime.gpus import POOL_FRACTION, POOL_VARIABLE
from jepa_jax.runtime.hardware import num_hosts

DAY = 86400.0
ACCUMULATION = "Accumulation keeps the batch; losses and norms over a batch see one part at a time."


@dataclasses.dataclass(frozen=True)
class Circumstances:
    """What a plan is told from outside: the size of the data, a price, the loader of this machine."""

    data: DataFacts
    price_per_hour: float = 0.0  # of one GPU, in any currency
    loader_images_per_sec: float | None = None
    loader_note: str = ""  # why there is no rate


def gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:,.2f} GiB"


def plan_lines(plan: Plan, about: Circumstances, name: str) -> list[str]:
    """The whole plan of one GPU."""
    row, gpu = plan.row, plan.request.gpu
    count = f"{plan.request.devices} x " if plan.request.devices > 1 else ""
    lines = [
        "",
        f"{name} on {count}{gpu.name}: batch {row.facts.batch_size:,}, {row.facts.precision}"
        + (f", {row.facts.accum_steps} accumulation steps" if row.facts.accum_steps > 1 else "")
        + (", remat" if row.facts.remat != "none" else "")
        + (f", FSDP over {row.facts.fsdp}" if row.facts.fsdp > 1 else ""),
        "",
        *memory_lines(row),
        "",
        *explanation(row),
        "",
        *table_lines(plan),
        "",
        *speed_lines(plan, about),
    ]
    if row.verdict == NO:
        lines += ["", *ways_out_lines(plan.ways_out)]
    elif pool := pool_lines(row):
        lines += ["", *pool]
    return lines


def memory_lines(row: Row) -> list[str]:
    facts, need = row.facts, row.need
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
        ("memory of the card", row.capacity),
    ]
    share = 100 * need.total / row.capacity
    return ["memory of one device", *(f"  {label:<44}{gib(size):>14}" for label, size in parts)] + [
        f"verdict: {row.verdict} ({share:.0f} % of the card; fits up to {100 * FITS_BELOW:.0f} %, tight up to 100 %)"
    ]


def explanation(row: Row) -> list[str]:
    """Shares of the peak in words."""
    facts = row.facts
    peak = max(1, facts.peak_bytes)
    activations = max(0, peak - facts.argument_bytes - facts.parameter_bytes)
    kept = 100 * activations / peak
    state = 100 * facts.state_bytes / peak
    gradients = 100 * facts.parameter_bytes / peak
    lines = [
        f"{kept:.0f} % of the peak are activations kept for the backward pass and temporaries: they grow with the",
        "batch and shrink with remat (recomputed), accumulation (a part at a time) and more devices.",
        f"{state:.0f} % are parameters, optimizer and statistics, about {gradients:.0f} % gradients: "
        "only FSDP over several devices divides them.",
    ]
    donated = facts.alias_bytes >= facts.state_bytes
    lines.append(
        "The new state takes the place of the old one (donated)."
        if donated
        else f"{gib(facts.state_bytes - facts.alias_bytes)} of the state are not donated: they are held twice."
    )
    for kind, (times, sent) in facts.collectives.items():
        lines.append(f"{kind}: {times:,} a step, {gib(sent)} sent by each device")
    return lines


def table_lines(plan: Plan) -> list[str]:
    header = f"{'':<28}{'batch':>8}{'peak':>12}{'needed':>12}  {'verdict':<14}{'bound img/s':>12}{'largest batch':>15}"
    lines = [header]
    for row, largest in plan.largest:
        lines.append(row_line(row) + f"{largest_text(largest):>15}")
    lines += [row_line(row) for row in plan.batches]
    if any("train.accum_steps" in row.changes for row, _ in plan.largest):
        lines.append(ACCUMULATION)
    others = [largest.row for _, largest in plan.largest if largest.row] + plan.batches
    if any(pool_lines(row) for row in others):
        lines.append(
            f"Batches that need more than the {100 * POOL_FRACTION:.0f} % of a card that JAX takes, such as the "
            f"largest ones, need {POOL_VARIABLE}=0.95 in the environment."
        )
    return lines


def row_line(row: Row) -> str:
    return (
        f"{row.label:<28}{row.facts.batch_size:>8,}{gib(row.need.peak):>12}{gib(row.need.total):>12}  "
        f"{row.verdict:<14}{row.speed.images_per_sec:>12,.0f}"
    )


def largest_text(largest: Largest) -> str:
    if not largest.batch_size:
        return "none"
    return f"{largest.batch_size:,}" + (" (all data)" if largest.at_set else "")


def ways_out_lines(ways: Sequence[Row]) -> list[str]:
    if not ways:
        return [
            f"No way out was found: not even {BATCH_GRAIN} images a device fit. "
            "Use more devices with config.mesh.fsdp, or a smaller model."
        ]
    lines = ["ways out, each compiled: the fastest first, then another card:"]
    for way in ways:
        lines.append(
            f"  {way.label:<32}{gib(way.need.total):>12}  {way.verdict:<6} {way.speed.images_per_sec:>9,.0f} img/s"
        )
        changes = [f"--config.{key}={value}" for key, value in way.changes.items() if key != "gpu"]
        lines += [f"      {' '.join(changes)}"] if changes else []
    if any("train.accum_steps" in way.changes for way in ways):
        lines.append(ACCUMULATION)
    return lines


def pool_lines(row: Row, fraction: float = POOL_FRACTION) -> list[str]:
    """What to set if JAX, which takes `fraction` of a card, takes too little."""
    if row.need.pool <= fraction * row.capacity:
        return []
    enough = min(0.95, -(-row.need.pool * 100 // row.capacity) / 100 + 0.02)
    return [
        f"JAX takes {100 * fraction:.0f} % of the card, less than this step needs: set {POOL_VARIABLE}={enough:.2f}"
    ]


def speed_lines(plan: Plan, about: Circumstances) -> list[str]:
    row, gpu = plan.row, plan.request.gpu
    facts, speed = row.facts, row.speed
    low, high = speed.predicted
    moved = facts.bytes_moved * facts.devices
    lines = [
        f"a step: {facts.flops / 1e12:,.2f} TFLOP, {moved / 1e9:,.1f} GB moved: "
        f"{1e3 * speed.compute_seconds:,.1f} ms of products at {gpu.tflops(facts.precision):g} TFLOP/s, "
        f"{1e3 * speed.memory_seconds:,.1f} ms of memory traffic at {gpu.bandwidth_gb_per_second:,.0f} GB/s"
        + (f", {1e3 * speed.network_seconds:,.1f} ms of exchange" if facts.collectives else ""),
        f"bound: {speed.images_per_sec:,.0f} images/s, set by {speed.limit}; predicted {low:,.0f} to {high:,.0f} "
        f"({100 * EFFICIENCY[0]:.0f} to {100 * EFFICIENCY[1]:.0f} % of the bound, what training programs reach)",
    ]
    cost = run_cost(plan, about)
    span = f"{duration(cost['seconds'][0])} to {duration(cost['seconds'][1])}"
    money = f", {cost['price'][0]:,.2f} to {cost['price'][1]:,.2f} at {about.price_per_hour:g} an hour and GPU"
    assumed = " (size of the data assumed: it is not there)" if not about.data.found else ""
    lines.append(f"whole run: {cost['steps']:,} steps in {span}{money if about.price_per_hour else ''}{assumed}")
    lines.append(loader_line(plan, about))
    return lines


def run_cost(plan: Plan, about: Circumstances) -> dict[str, Any]:
    """Steps, seconds (from, to) and price (from, to) of the whole run at the predicted speed."""
    config = plan.request.config
    steps = Length.of(config, max(about.data.num_train, config.data.batch_size)).total_steps
    low, high = plan.row.speed.predicted
    images = steps * config.data.batch_size
    seconds = images / high, images / low
    hourly = about.price_per_hour * plan.request.devices / 3600
    return {"steps": steps, "seconds": seconds, "price": (seconds[0] * hourly, seconds[1] * hourly)}


def duration(seconds: float) -> str:
    if seconds >= 2 * DAY:
        return f"{seconds / DAY:,.1f} days"
    if seconds >= 5400:
        return f"{seconds / 3600:.1f} hours"
    return f"{seconds / 60:.1f} minutes" if seconds >= 90 else f"{seconds:.0f} seconds"


def loader_line(plan: Plan, about: Circumstances) -> str:
    hosts = num_hosts(plan.request.topology)
    needed = plan.row.speed.predicted[1] / hosts
    if plan.request.config.data.pipeline == "device":
        return "loader: none to keep up with, the data set lies on the device (data.pipeline = device)"
    where = " on each host" if hosts > 1 else ""
    text = f"loader: must deliver {needed:,.0f} images/s{where} to keep up with the predicted range"
    if about.loader_images_per_sec is None:
        return f"{text}; not measured here ({about.loader_note})"
    rate = about.loader_images_per_sec
    verdict = "enough" if rate >= needed else f"{100 * rate / needed:.0f} % of that: the loader would set the speed"
    return f"{text}; measured on this machine: {rate:,.0f}, {verdict}"


def plan_json(plan: Plan, about: Circumstances) -> dict[str, Any]:
    """One object a GPU; bytes and operations of one step, memory of one device."""
    facts, row = plan.row.facts, plan.row
    cost = run_cost(plan, about)
    return {
        "gpu": plan.request.gpu.key,
        "topology": plan.request.topology,
        "batch_size": facts.batch_size,
        "peak_bytes": facts.peak_bytes,
        "argument_bytes": facts.argument_bytes,
        "temp_bytes": facts.temp_bytes,
        "capacity_bytes": row.capacity,
        "needed_bytes": row.need.total,
        "margin_bytes": row.need.margin,
        "verdict": row.verdict,
        "fits": row.verdict != NO,
        "largest_batch": plan.largest[0][1].batch_size,
        "flops_per_step": facts.flops,
        "bytes_per_step": facts.bytes_moved * facts.devices,
        "images_per_sec_bound": row.speed.images_per_sec,
        "images_per_sec_predicted": list(row.speed.predicted),
        "limit": row.speed.limit,
        "parameter_bytes": facts.parameter_bytes,
        "optimizer_bytes": facts.optimizer_bytes,
        "target_bytes": facts.target_bytes,
        "alias_bytes": facts.alias_bytes,
        "state_bytes": facts.state_bytes,
        "collectives": facts.collectives,
        "host_calls": facts.host_calls,
        "encoder_float32_products": len(facts.encoder_float32_products),
        "steps": cost["steps"],
        "run_seconds_predicted": list(cost["seconds"]),
        "price_predicted": list(cost["price"]) if about.price_per_hour else None,
        "loader_images_per_sec": about.loader_images_per_sec,
        "variants": [{**row_json(row), "largest_batch": largest.batch_size} for row, largest in plan.largest],
        "batches": [row_json(row) for row in plan.batches],
        "ways_out": [row_json(row) for row in plan.ways_out],
    }


def row_json(row: Row) -> dict[str, Any]:
    return {
        "label": row.label,
        "changes": row.changes,
        "batch_size": row.facts.batch_size,
        "peak_bytes": row.facts.peak_bytes,
        "needed_bytes": row.need.total,
        "verdict": row.verdict,
        "images_per_sec_bound": row.speed.images_per_sec,
    }


def fits_everywhere(plans: Sequence[Plan]) -> bool:
    return all(plan.row.verdict != NO for plan in plans)
