"""Plans as an HTML page."""

from collections.abc import Sequence

from jepa_jax.planning.estimate import FITS, NO, Estimate
from jepa_jax.planning.plan_text import PlanContext, gib, plan_lines
from jepa_jax.planning.planner import Plan
from jepa_jax.reports.html import Section, escape, page


def plans_page(plans: Sequence[Plan], context: PlanContext, name: str) -> str:
    """Returns a self-contained HTML page of plans."""
    sections = []
    for plan in plans:
        estimate = plan.estimate
        color = "#2a7d46" if estimate.verdict == FITS else "#b3261e" if estimate.verdict == NO else "#9a6700"
        text = "\n".join(plan_lines(plan, context, name)).strip()
        body = (
            f'<p style="color:{color};font-weight:600">{escape(estimate.verdict)}: {gib(estimate.need.total)} needed '
            f'of {gib(estimate.capacity)}</p>{memory_bar(estimate)}<pre style="overflow-x:auto">{escape(text)}</pre>'
        )
        sections.append(Section(f"{plan.request.devices} x {plan.request.gpu.name}", body))
    return page(f"Plan of {name}", f"<h1>Plan of {escape(name)}</h1>", sections)


def memory_bar(estimate: Estimate) -> str:
    """Returns the memory of a GPU as a bar: state, activations and temporaries, margin, free."""
    facts, need = estimate.facts, estimate.need
    whole = max(estimate.capacity, need.total)
    parts = [
        ("state", facts.argument_bytes, "#4269d0"),
        ("activations and temporaries", facts.peak_bytes - facts.argument_bytes, "#efb118"),
        ("data and margin", need.total - need.peak, "#9c9c9c"),
    ]
    place, bars = 0.0, []
    for label, size, color in parts:
        width = 600 * size / whole
        bars.append(
            f'<rect x="{place:.1f}" width="{width:.1f}" height="22" fill="{color}">'
            f"<title>{label}: {gib(size)}</title></rect>"
        )
        place += width
    edge = 600 * estimate.capacity / whole
    line = f'<line x1="{edge:.1f}" x2="{edge:.1f}" y1="-3" y2="25" stroke="currentColor" stroke-width="2"/>'
    legend = " · ".join(f'<span style="color:{color}">■</span> {label} {gib(size)}' for label, size, color in parts)
    return f'<svg viewBox="-2 -4 606 30" width="100%" role="img">{"".join(bars)}{line}</svg><p>{legend}</p>'
