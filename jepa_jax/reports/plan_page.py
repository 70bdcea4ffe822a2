"""The page of plans: cards against time, money and fit; for each card memory by part, kernels by time and ways out."""

from collections.abc import Sequence

from jepa_jax.base.text import GIB, duration, gib
from jepa_jax.compiled.buffers import short_scope
from jepa_jax.planning.estimate import FITS, NO, Estimate
from jepa_jax.planning.factors import kernel_seconds
from jepa_jax.planning.frontier import Frontier
from jepa_jax.planning.planner import REMATS, Plan
from jepa_jax.planning.run_cost import PlanContext, run_cost
from jepa_jax.reports.charts import Series, line_chart
from jepa_jax.reports.page import Page
from jepa_jax.reports.parts import (
    Bar,
    Bars,
    Card,
    Cell,
    Details,
    KeyFigure,
    KeyFigures,
    Part,
    Piece,
    Section,
    StackedBar,
    StackedBars,
    Table,
    Text,
)
from jepa_jax.reports.plan_text import (
    ACCUMULATION,
    ESTIMATE_COLUMNS,
    estimate_cells,
    flags,
    ladder_tables,
    largest_text,
    memory_parts,
    plan_lines,
    recomputation_lines,
    variant_rows,
)

KERNELS = 12  # rows of the table of kernels
STYLES = {FITS: "good", NO: "bad"}  # anything else: "warn"
PART_STYLES = ("state", "optimizer", "target", "batch", "activations", "data", "margin")  # of `memory_parts`


def plan_page(plans: Sequence[Plan], context: PlanContext, name: str) -> Page:
    """Returns the page of the plans of one config."""
    sections = [Section("Cards", [cards_table(plans, context)])] if len(plans) > 1 else []
    for plan in plans:
        parts: list[Part] = [*head(plan, context), memory_card(plan.estimate), kernels_card(plan.estimate)]
        parts += [variants_card(plan)]
        parts += [ways_card(plan)] if plan.ways_out else []
        parts += [frontier_chart(plan.frontier)] if plan.frontier else []
        if plan.ladder:
            tables = ladder_tables(plan.ladder)
            parts += [Card(table.title.capitalize(), [Table(table.rows, table.header)], table.note) for table in tables]
        text = Text("\n".join(plan_lines(plan, context, name)).strip(), "preformatted")
        parts.append(Details("The plan as text", [text]))
        sections.append(Section(f"{plan.request.devices} x {plan.request.gpu.name}", parts))
    return Page(f"Plan of {name}", sections)


def head(plan: Plan, context: PlanContext) -> list[Part]:
    """Returns the verdict and the figures that decide."""
    estimate, speed, cost = plan.estimate, plan.estimate.speed, run_cost(plan, context)
    low, high = speed.predicted
    largest = largest_text(plan.largest[0][1])
    figures = [
        KeyFigure("predicted samples/s", f"{speed.images_per_sec:,.0f}", f"{low:,.0f} to {high:,.0f}", main=True),
        KeyFigure("needed", gib(estimate.need.total), f"of {gib(estimate.capacity)}"),
        KeyFigure("largest batch", largest, f"now {estimate.batch_size:,}"),
        KeyFigure("whole run", duration(sum(cost.parts.values())), " to ".join(map(duration, cost.seconds))),
    ]
    if any(cost.prices):
        price = " to ".join(f"{one:,.2f}" for one in cost.prices)
        figures.append(KeyFigure("price", price, f"{context.price_of(plan.request.gpu):g} per hour"))
    verdict = f"{estimate.verdict}: {gib(estimate.need.total)} needed of {gib(estimate.capacity)}"
    return [Text(verdict, STYLES.get(estimate.verdict, "warn")), KeyFigures(figures)]


def cards_table(plans: Sequence[Plan], context: PlanContext) -> Table:
    """Returns the cards with fit, speed, time and money; a click on a heading sorts."""
    columns = ["card", "verdict", "needed", "of", "samples/s", "nine of ten within", "whole run", "price"]
    rows = []
    for plan in plans:
        estimate, cost = plan.estimate, run_cost(plan, context)
        error = estimate.speed.factors.p90_error
        seconds, price = sum(cost.parts.values()), sum(cost.prices) / 2
        style = STYLES.get(estimate.verdict, "warn")
        rows.append([
            Cell(f"{plan.request.devices} x {plan.request.gpu.name}", plan.request.gpu.name),
            Cell(estimate.verdict, estimate.verdict, style),
            Cell(gib(estimate.need.total), estimate.need.total),
            Cell(gib(estimate.capacity), estimate.capacity),
            Cell(f"{estimate.speed.images_per_sec:,.0f}", estimate.speed.images_per_sec),
            Cell(f"{100 * error:.0f} %", error),
            Cell(duration(seconds) if estimate.fits else "-", seconds if estimate.fits else None),
            Cell(f"{price:,.2f}" if price and estimate.fits else "-", price if price and estimate.fits else None),
        ])  # fmt: skip
    return Table(rows, columns, sortable=True)


def memory_card(estimate: Estimate) -> Card:
    """Returns the memory of a device by part, with the limit of the card, and whether XLA recomputes."""
    return Card("Memory of one device", [memory_bar(estimate), Text(" ".join(recomputation_lines(estimate)), "sub")])


def memory_bar(estimate: Estimate) -> StackedBars:
    """Returns the memory that a step needs as a divided bar; a labelled line marks the memory of the card."""
    need, parts = estimate.need, memory_parts(estimate)
    whole = max(estimate.capacity, need.total)
    shown = [(style, name, size) for style, (name, size) in zip(PART_STYLES, parts.items(), strict=True) if size]
    legend = {style: f"{name} {gib(size)}" for style, name, size in shown}
    pieces = [Piece(style, 100 * size / need.total, legend[style]) for style, _, size in shown]
    bar = StackedBar(
        pieces,
        width=100 * need.total / whole,
        mark=100 * estimate.capacity / whole,
        mark_label=f"card: {gib(estimate.capacity)}",
    )
    return StackedBars([bar], legend)


def kernels_card(estimate: Estimate) -> Card:
    """Returns where the predicted time of a step goes: by kind, and the kernels that take longest."""
    speed, gpu = estimate.speed, estimate.request.gpu
    shares = sorted(speed.parts.items(), key=lambda part: -part[1])
    bars = [Bar(name, 100 * part / speed.seconds, "main", f"{1e3 * part:,.1f} ms") for name, part in shares]
    timed = [(k.runs * kernel_seconds(k, gpu, speed.factors.shares), k) for k in estimate.facts.kernels]
    timed.sort(key=lambda pair: -pair[0])
    rows = [
        [kernel.kind, short_scope(kernel.scope)[-70:], kernel.runs, f"{1e3 * seconds:,.2f}",
         f"{100 * seconds / speed.seconds:.1f}", f"{kernel.runs * kernel.flops / 1e12:,.2f}",
         f"{kernel.runs * kernel.bytes / 1e9:,.2f}"]
        for seconds, kernel in timed[:KERNELS]
    ]  # fmt: skip
    table = Table(rows, ["kind", "where", "runs", "ms", "% of the step", "TFLOP", "GB"])
    return Card(f"Kernels by time: {1e3 * speed.seconds:,.1f} ms per step", [Bars({"": bars}), table], speed.error_text)


def variants_card(plan: Plan) -> Card:
    """Returns the variants with their largest batches."""
    return Card("Variants", [Table(variant_rows(plan), [*ESTIMATE_COLUMNS, "largest batch"])])


def ways_card(plan: Plan) -> Card:
    """Returns the changes that make the config fit, with their flags."""
    rows = [[*estimate_cells(way), flags(way)] for way in plan.ways_out]
    note = ACCUMULATION if any("train.accum_steps" in way.changes for way in plan.ways_out) else ""
    return Card("Ways out", [Table(rows, [*ESTIMATE_COLUMNS, "flags"])], note)


def frontier_chart(frontier: Frontier) -> Card:
    """Returns a chart of memory over predicted time: combinations by policy, the line that none beats, the budget."""
    series = [_frontier_series("none is better in both", frontier.best, "line")]
    for policy in REMATS:
        own = [point for point in frontier.points if point.changes["train.remat"] == policy]
        series += [_frontier_series(f"remat {policy}", own, "dots")] if own else []
    budget = ("budget", frontier.budget_bytes / GIB)
    return line_chart(
        "Memory against time", series, x_label="predicted ms per step", y_label="GiB needed", from_zero=True,
        levels=[budget], wide=True,
    )  # fmt: skip


def _frontier_series(name: str, points: Sequence[Estimate], style: str) -> Series:
    placed = sorted((1e3 * point.speed.seconds, point.need.total / GIB, _parts(point)) for point in points)
    x, y, labels = zip(*placed, strict=True)
    return Series(name, x, y, style, labels=labels if style == "dots" else ())


def _parts(point: Estimate) -> str:
    count = point.changes["train.accum_steps"]
    return f"{count} parts" if count > 1 else "whole batch"
