"""The page of plans: cards against time, money and fit; for each card memory by part, kernels by time and tables."""

from collections.abc import Sequence

from jepa_jax.base.text import GIB, duration, gib
from jepa_jax.compiled.buffers import short_scope
from jepa_jax.planning.estimate import FITS, NO
from jepa_jax.planning.factors import timed_kernels
from jepa_jax.planning.planner import REMATS, Estimate, FailedPlan, Frontier, Plan
from jepa_jax.planning.run_cost import PlanContext, run_cost
from jepa_jax.reports import parts
from jepa_jax.reports.charts import Series, line_chart
from jepa_jax.reports.page import Page
from jepa_jax.reports.plan_text import FAILED, largest_text, memory_parts, plan_lines, plan_tables, recomputation_text

KERNELS = 12  # rows of the table of kernels
STYLES = {FITS: "good", NO: "bad"}  # anything else: "warn"
PART_STYLES = ("state", "optimizer", "target", "batch", "activations", "data", "margin")  # of `memory_parts`


def plan_page(plans: Sequence[Plan], context: PlanContext, name: str, failed: Sequence[FailedPlan] = ()) -> Page:
    """Returns the page of the plans of one config, and of the GPUs for which it could not be compiled."""
    sections = []
    if len(plans) + len(failed) > 1:
        reasons = [parts.Text(f"{one.request.gpu.name}: {FAILED} ({one.reason})", "bad") for one in failed]
        sections.append(parts.Section("Cards", [cards_table(plans, context), *reasons]))
    for plan in plans:
        recomputation = parts.Text(recomputation_text(plan.estimate), "sub")
        memory = parts.Card("Memory of one device", [memory_bar(plan.estimate), recomputation])
        shown: list[parts.Part] = [*head(plan, context), memory, kernels_card(plan.estimate)]
        for title, header, rows, note in plan_tables(plan):
            shown.append(parts.Card(title.capitalize(), [parts.Table(rows, header)], note))
        shown += [frontier_chart(plan.frontier)] if plan.frontier else []
        text = parts.Text("\n".join(plan_lines(plan, context, name)).strip(), "preformatted")
        shown.append(parts.Details("The plan as text", [text]))
        sections.append(parts.Section(f"{plan.request.devices} x {plan.request.gpu.name}", shown))
    return Page(f"Plan of {name}", sections)


def head(plan: Plan, context: PlanContext) -> list[parts.Part]:
    """Returns the verdict and the figures that decide."""
    estimate, speed, cost = plan.estimate, plan.estimate.speed, run_cost(plan, context)
    low, high = speed.predicted
    largest = largest_text(plan.largest[0][1])
    figures = [
        parts.KeyFigure("predicted samples/s", f"{speed.images_per_sec:,.0f}", f"{low:,.0f} to {high:,.0f}", main=True),
        parts.KeyFigure("needed", gib(estimate.need.total), f"of {gib(estimate.capacity)}"),
        parts.KeyFigure("largest batch", largest, f"now {estimate.batch_size:,}"),
        parts.KeyFigure("whole run", duration(sum(cost.parts.values())), " to ".join(map(duration, cost.seconds))),
    ]
    if any(cost.prices):
        price = " to ".join(f"{one:,.2f}" for one in cost.prices)
        figures.append(parts.KeyFigure("price", price, f"{context.price_of(plan.request.gpu):g} per hour"))
    verdict = f"{estimate.verdict}: {gib(estimate.need.total)} needed of {gib(estimate.capacity)}"
    return [parts.Text(verdict, STYLES.get(estimate.verdict, "warn")), parts.KeyFigures(figures)]


def cards_table(plans: Sequence[Plan], context: PlanContext) -> parts.Table:
    """Returns the cards with fit, speed, time and money; a click on a heading sorts."""
    columns = ["card", "verdict", "needed", "of", "samples/s", "nine of ten within", "whole run", "price"]
    rows = []
    for plan in plans:
        estimate, cost = plan.estimate, run_cost(plan, context)
        error = estimate.speed.factors.p90_error
        seconds, price = sum(cost.parts.values()), sum(cost.prices) / 2
        style = STYLES.get(estimate.verdict, "warn")
        rows.append([
            parts.Cell(f"{plan.request.devices} x {plan.request.gpu.name}", plan.request.gpu.name),
            parts.Cell(estimate.verdict, estimate.verdict, style),
            parts.Cell(gib(estimate.need.total), estimate.need.total),
            parts.Cell(gib(estimate.capacity), estimate.capacity),
            parts.Cell(f"{estimate.speed.images_per_sec:,.0f}", estimate.speed.images_per_sec),
            parts.Cell(f"{100 * error:.0f} %", error),
            parts.Cell(duration(seconds) if estimate.fits else "-", seconds if estimate.fits else None),
            parts.Cell(f"{price:,.2f}" if price and estimate.fits else "-", price if price and estimate.fits else None),
        ])  # fmt: skip
    return parts.Table(rows, columns, sortable=True)


def memory_bar(estimate: Estimate) -> parts.StackedBars:
    """Returns the memory that a step needs as a divided bar; a labelled line marks what JAX takes of the card."""
    need, whole = estimate.need, max(estimate.capacity, estimate.need.total)
    named = zip(PART_STYLES, memory_parts(estimate).items(), strict=True)
    shown = [(style, name, size) for style, (name, size) in named if size]
    legend = {style: f"{name} {gib(size)}" for style, name, size in shown}
    pieces = [parts.Piece(style, 100 * size / need.total, legend[style]) for style, _, size in shown]
    bar = parts.StackedBar(
        pieces,
        width=100 * need.total / whole,
        mark=100 * estimate.capacity / whole,
        mark_label=f"JAX takes {gib(estimate.capacity)}",
    )
    return parts.StackedBars([bar], legend)


def kernels_card(estimate: Estimate) -> parts.Card:
    """Returns where the predicted time of a step goes: by kind, and the kernels that take longest."""
    speed, gpu = estimate.speed, estimate.request.gpu
    shares = sorted(speed.parts.items(), key=lambda part: -part[1])
    bars = [parts.Bar(name, 100 * part / speed.seconds, "main", f"{1e3 * part:,.1f} ms") for name, part in shares]
    rows = [
        [kernel.kind, short_scope(kernel.scope)[-70:], kernel.runs, f"{1e3 * seconds:,.2f}",
         f"{100 * seconds / speed.seconds:.1f}", f"{kernel.runs * kernel.flops / 1e12:,.2f}",
         f"{kernel.runs * kernel.bytes / 1e9:,.2f}"]
        for seconds, kernel in timed_kernels(estimate.facts.kernels, gpu, speed.factors.shares)[:KERNELS]
    ]  # fmt: skip
    table = parts.Table(rows, ["kind", "where", "runs", "ms", "% of the step", "TFLOP", "GB"])
    title = f"Kernels by time: {1e3 * speed.seconds:,.1f} ms per step"
    return parts.Card(title, [parts.Bars({"": bars}), table], speed.error_text)


def frontier_chart(frontier: Frontier) -> parts.Card:
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
    placed = sorted((1e3 * point.speed.seconds, point.need.total / GIB, point.label) for point in points)
    x, y, labels = zip(*placed, strict=True)
    return Series(name, x, y, style, labels=labels if style == "dots" else ())
