"""The page of plans: one section per GPU with the verdict, the memory as a bar, and the plan as text."""

from collections.abc import Sequence

from jepa_jax.base.text import gib
from jepa_jax.planning.estimate import FITS, NO, Estimate
from jepa_jax.planning.plan_text import PlanContext, plan_lines
from jepa_jax.planning.planner import Plan
from jepa_jax.reports.page import Page, PageSection
from jepa_jax.reports.parts import Card, Piece, StackedBar, StackedBars, Text


def plan_page(plans: Sequence[Plan], context: PlanContext, name: str) -> Page:
    """Returns the page of the plans of one config."""
    sections = []
    for plan in plans:
        estimate = plan.estimate
        style = {FITS: "good", NO: "bad"}.get(estimate.verdict, "warn")
        verdict = Text(f"{estimate.verdict}: {gib(estimate.need.total)} needed of {gib(estimate.capacity)}", style)
        text = Text("\n".join(plan_lines(plan, context, name)).strip(), "preformatted")
        title = f"{plan.request.devices} x {plan.request.gpu.name}"
        sections.append(PageSection(title, [Card("", [verdict, memory_bar(estimate), text])]))
    return Page(f"Plan of {name}", sections)


def memory_bar(estimate: Estimate) -> StackedBars:
    """Returns the memory that a step needs as a divided bar; a line marks the memory of the card."""
    sizes = {
        "state": ("state", estimate.facts.argument_bytes),
        "activations": ("activations and temporaries", estimate.facts.peak_bytes - estimate.facts.argument_bytes),
        "margin": ("data and margin", estimate.need.total - estimate.need.peak),
    }
    whole = max(estimate.capacity, estimate.need.total)
    legend = {style: f"{label} {gib(size)}" for style, (label, size) in sizes.items()}
    pieces = [Piece(style, 100 * size / estimate.need.total, legend[style]) for style, (_, size) in sizes.items()]
    return StackedBars(
        [StackedBar(pieces, width=100 * estimate.need.total / whole, mark=100 * estimate.capacity / whole)], legend
    )
