"""The page of plans: one section per GPU with the verdict, the memory as a bar, and the plan as text."""

from collections.abc import Sequence

from jepa_jax.base.text import gib
from jepa_jax.planning.planner import FITS, NO, Plan, Row
from jepa_jax.reports.page import Page, PageSection
from jepa_jax.reports.parts import Card, Piece, StackedBar, StackedBars, Text
from jepa_jax.reports.plan_report import Circumstances, plan_lines


def plan_page(plans: Sequence[Plan], about: Circumstances, name: str) -> Page:
    """Returns the page of the plans of one config."""
    sections = []
    for plan in plans:
        row = plan.row
        style = {FITS: "good", NO: "bad"}.get(row.verdict, "warn")
        verdict = Text(f"{row.verdict}: {gib(row.need.total)} needed of {gib(row.capacity)}", style)
        text = Text("\n".join(plan_lines(plan, about, name)).strip(), "preformatted")
        title = f"{plan.request.devices} x {plan.request.gpu.name}"
        sections.append(PageSection(title, [Card("", [verdict, memory_bar(row), text])]))
    return Page(f"Plan of {name}", sections)


def memory_bar(row: Row) -> StackedBars:
    """Returns the memory that a step needs as a divided bar; a line marks the memory of the card."""
    sizes = {
        "state": ("state", row.facts.argument_bytes),
        "activations": ("activations and temporaries", row.facts.peak_bytes - row.facts.argument_bytes),
        "margin": ("data and margin", row.need.total - row.need.peak),
    }
    whole = max(row.capacity, row.need.total)
    legend = {style: f"{label} {gib(size)}" for style, (label, size) in sizes.items()}
    pieces = [Piece(style, 100 * size / row.need.total, legend[style]) for style, (_, size) in sizes.items()]
    return StackedBars(
        [StackedBar(pieces, width=100 * row.need.total / whole, mark=100 * row.capacity / whole)], legend
    )
