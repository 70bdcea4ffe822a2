"""A scaling guide as tables for the terminal, JSON objects, a Markdown file and a plot."""

import pathlib
import textwrap
from collections.abc import Sequence
from typing import Any, NamedTuple

from jepa_jax.base.files import write_atomically
from jepa_jax.base.text import GIB
from jepa_jax.planning.estimate import FITS_BELOW, Estimate
from jepa_jax.planning.plan_text import ACCUMULATION
from jepa_jax.planning.scale_guide import Rung, ScaleGuide, SizeRow, mean_samples_per_sec
from jepa_jax.reports.figures import PALETTE, new_figure, save_figure
from jepa_jax.reports.tables import markdown_table, text_table

MARKDOWN, PLOT = "scale_guide.md", "scale_guide.png"
WIDTH = 120  # characters of a line of notes on a terminal
SHADES = dict(zip(("parameters", "optimizer", "EMA copy", "other input"), PALETTE, strict=False)) | {
    "activations": "#9aa7bd",
    "margin": "#d5d9e0",
}


class Section(NamedTuple):
    """A table with what it says in words."""

    title: str
    header: Sequence[str]
    rows: list[list[str]]
    notes: list[str]
    items: Sequence[tuple[str, str]] = ()  # names and flags


def memory_parts(estimate: Estimate) -> dict[str, int]:
    """Returns the bytes that one device must hold, by what they are; together they are the need."""
    facts, need = estimate.facts, estimate.need
    own = {"parameters": facts.parameter_bytes, "optimizer": facts.optimizer_bytes, "EMA copy": facts.target_bytes}
    return {
        **own,
        "other input": facts.argument_bytes - sum(own.values()),
        "activations": facts.peak_bytes - facts.argument_bytes,
        "margin": need.total - need.peak,
    }


def sections(guide: ScaleGuide) -> list[Section]:
    """Returns the tables of a guide; those without rows are left out."""
    every = [
        memory_section(guide),
        speed_section(guide),
        retreat_section(guide),
        size_section(guide),
        rate_section(guide),
    ]
    return [section for section in every if section.rows]


def memory_section(guide: ScaleGuide) -> Section:
    """Returns the memory of each rung, part by part, beside what was claimed."""
    parts = [name for name in SHADES if any(memory_parts(rung.estimate)[name] for rung in guide.rungs)]
    claims = any(rung.claimed_gb for rung in guide.rungs)
    rows = []
    for rung in guide.rungs:
        estimate, sizes = rung.estimate, memory_parts(rung.estimate)
        claimed = [claim_text(rung)] if claims else []
        need = [in_gib(estimate.need.total), *claimed, share_text(estimate), estimate.verdict]
        rows.append([rung.name, f"{estimate.batch_size:,}", *(in_gib(sizes[part]) for part in parts), *need])
    header = ["rung", "batch", *parts, "needed", *(["claimed"] if claims else []), "of the card", "verdict"]
    capacity = in_gib(guide.configured.estimate.capacity)
    notes = [
        f"In GiB per device, of {capacity} that the card has; fits up to {100 * FITS_BELOW:.0f} %, tight up to 100 %. "
        "Parameters, optimizer state and EMA copy are exact; other input is the batch and statistics. Activations, "
        "with gradients and temporaries, are what the compiled step holds at its peak beyond its input. The margin, "
        "with batches that wait on the device, is an assumption (docs/guides/plan.md).",
    ]
    notes += ["Claimed: GB as published by others, for their own program."] if claims else []
    return Section("Memory of each rung", header, rows, notes)


def speed_section(guide: ScaleGuide) -> Section:
    """Returns operations and speed of each rung."""
    rows = [[rung.name, f"{rung.estimate.batch_size:,}", *speed_cells(rung.estimate)] for rung in guide.rungs]
    note = (
        "Predicted from the kernels of the compiled step; the range holds nine of ten predictions of unseen "
        "measurements (docs/results/predictions.md). The bound takes the card's peak rates for granted."
    )
    header = ["rung", "batch", "TFLOP per step", "GFLOP per sample", "samples/s", "range", "bound", "most time"]
    return Section("Operations and speed of each rung", header, rows, [note])


def speed_cells(estimate: Estimate) -> list[str]:
    """Returns operations per step and sample, the predicted speed, its range, the bound and what limits."""
    flops, speed = estimate.facts.flops, estimate.speed
    low, high = speed.predicted
    cells = [f"{flops / 1e12:,.2f}", f"{flops / estimate.batch_size / 1e9:,.2f}"]
    speeds = [f"{speed.images_per_sec:,.0f}", f"{low:,.0f}-{high:,.0f}", f"{speed.bound_images_per_sec:,.0f}"]
    return [*cells, *speeds, speed.limit]


def retreat_section(guide: ScaleGuide) -> Section:
    """Returns what to change in the largest rung if memory runs out."""
    top = guide.top.estimate
    rows = [
        [row.label, f"{row.batch_size:,}", in_gib(row.need.peak), in_gib(row.need.total), row.verdict]
        + [f"{row.speed.images_per_sec:,.0f}", "{:,.0f}-{:,.0f}".format(*row.speed.predicted)]
        for row in [top, *guide.retreat]
    ]
    header = ["change", "batch", "peak", "needed", "verdict", "samples/s", "range"]
    state = "does not fit" if not top.fits else "needs the most of all rungs"
    notes = [f"Changes of {top.label!r}, which {state}, in the order in which to try them."]
    notes += [ACCUMULATION] if any("train.accum_steps" in row.changes for row in guide.retreat) else []
    if not any(row.label.startswith("model of") for row in guide.retreat):
        notes.append("Then a smaller model: this ladder has none.")
    items = [(row.label, flags(row)) for row in guide.retreat]
    return Section("When memory runs out", header, rows if guide.retreat else [], notes, items)


def flags(estimate: Estimate) -> str:
    """Returns the changes of an estimate as flags."""
    return " ".join(f"--config.{key}={flag_value(value)}" for key, value in estimate.changes.items())


def flag_value(value: Any) -> str:
    """Returns a value as it is written in a flag."""
    return ",".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


def size_section(guide: ScaleGuide) -> Section:
    """Returns memory and speed at each size that batches are padded to."""
    rows, notes = [], ["Memory and time of a batch follow its longest element; batches are padded to one of these."]
    for name in dict.fromkeys(row.rung for row in guide.sizes):
        own = [row for row in guide.sizes if row.rung == name]
        rows += [size_cells(row) for row in own]
        mean, longest = mean_samples_per_sec(own), own[-1].estimate.speed.images_per_sec
        if mean is None:
            continue
        notes.append(
            f"{name}: with every batch at its own size {mean:,.0f} samples/s are predicted, "
            f"with all padded to {own[-1].size} {longest:,.0f} ({mean / longest:.2f} times)."
        )
    header = ["rung", "longest", "elements", "batch", "peak", "needed", "verdict", "GFLOP per sample"]
    return Section("Effect of the longest element", [*header, "samples/s"], rows, notes)


def size_cells(row: SizeRow) -> list[str]:
    """Returns the cells of one size."""
    estimate = row.estimate
    need = [in_gib(estimate.need.peak), in_gib(estimate.need.total), estimate.verdict]
    _, per_sample, predicted, *_ = speed_cells(estimate)
    share = "unknown" if row.share is None else f"{100 * row.share:.0f} %"
    return [row.rung, row.size, share, f"{estimate.batch_size:,}", *need, per_sample, predicted]


def rate_section(guide: ScaleGuide) -> Section:
    """Returns peak rates by the rules of thumb."""
    optim = guide.configured.estimate.request.config.optim
    reference = optim.lr or 1.0
    rows = [
        [f"{row.batch_size:,}", f"{row.configured:.3g}", f"{row.linear:.3g}", f"{row.sqrt:.3g}"]
        + [f"{row.linear / reference:.3g}", f"{row.sqrt / reference:.3g}"]
        for row in guide.rates
    ]
    header = ["batch", f"config ({optim.batch_scaling})", "linear", "square root", "x linear", "x square root"]
    notes = [
        f"Rules of thumb, not computed from this model: optim.lr = {optim.lr:g} is meant for batch "
        f"{optim.reference_batch:,} (optim.reference_batch). Linear scaling is customary with SGD, square-root scaling "
        "with Adam; beyond some batch neither holds. --config.optim.batch_scaling=linear or sqrt applies one of them, "
        "to the rates of parameter groups as well. jepa-jax lr-search measures.",
    ]
    return Section("Learning rate", header, rows, notes)


def claim_text(rung: Rung) -> str:
    return "-".join(f"{figure:g}" for figure in rung.claimed_gb)


def share_text(estimate: Estimate) -> str:
    return f"{100 * estimate.need.total / estimate.capacity:.0f} %"


def in_gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:,.2f}"


def guide_text(guide: ScaleGuide, name: str) -> str:
    """Returns the guide for a terminal."""
    lines = [title_of(guide, name)]
    for section in sections(guide):
        lines += ["", section.title, text_table([list(section.header), *section.rows])]
        lines += [line for note in section.notes for line in textwrap.wrap(note, WIDTH, break_on_hyphens=False)]
        lines += [f"  {name}: {text}" for name, text in section.items]
    return "\n".join(lines)


def guide_markdown(guide: ScaleGuide, name: str, command: str, plot: str = PLOT) -> str:
    """Returns the guide as a Markdown page that shows the plot and the command that made it."""
    lines = [f"# {title_of(guide, name)}", "", "```", command, "```", ""]
    lines += ["Compiled, not measured: no GPU took part.", "", f"![Memory of each rung]({plot})", ""]
    for section in sections(guide):
        right = section.header[1:]
        lines += [f"## {section.title}", "", markdown_table(section.header, section.rows, right)]
        lines += [line for note in section.notes for line in (note, "")]
        lines += [*(f"- {name}: `{text}`" for name, text in section.items), ""] if section.items else []
    return "\n".join(lines)


def title_of(guide: ScaleGuide, name: str) -> str:
    request = guide.configured.estimate.request
    count = f"{request.devices} x " if request.devices > 1 else ""
    return f"Scaling guide: {name} on {count}{request.gpu.name}"


def guide_json(guide: ScaleGuide) -> list[dict[str, Any]]:
    """Returns one JSON object per row: section "ladder", "out_of_memory" or "size"; bytes are per device."""
    rates = {row.batch_size: row for row in guide.rates}
    rows = []
    for rung in guide.rungs:
        rate = rates[rung.estimate.batch_size]
        advice = {"config": rate.configured, "linear": rate.linear, "sqrt": rate.sqrt}
        row = row_json("ladder", rung.estimate)
        rows.append({**row, "claimed_gb": list(rung.claimed_gb), "learning_rates": advice})
    rows += [row_json("out_of_memory", estimate) for estimate in guide.retreat]
    sizes = [{**row_json("size", row.estimate), "size": row.size, "share": row.share} for row in guide.sizes]
    return rows + sizes


def row_json(section: str, estimate: Estimate) -> dict[str, Any]:
    """Returns an estimate as a JSON object."""
    facts, request = estimate.facts, estimate.request
    return {
        "section": section,
        "name": estimate.label,
        "gpu": request.gpu.key,
        "topology": request.topology,
        "changes": estimate.changes,
        "batch_size": estimate.batch_size,
        "parameter_bytes": facts.parameter_bytes,
        "optimizer_bytes": facts.optimizer_bytes,
        "target_bytes": facts.target_bytes,
        "activation_bytes": facts.peak_bytes - facts.argument_bytes,
        "temp_bytes": facts.temp_bytes,
        "peak_bytes": facts.peak_bytes,
        "margin_bytes": estimate.need.margin,
        "needed_bytes": estimate.need.total,
        "capacity_bytes": estimate.capacity,
        "verdict": estimate.verdict,
        "fits": estimate.fits,
        "flops_per_step": facts.flops,
        "flops_per_sample": facts.flops / estimate.batch_size,
        "samples_per_sec": estimate.speed.images_per_sec,
        "samples_per_sec_bound": estimate.speed.bound_images_per_sec,
        "samples_per_sec_predicted": list(estimate.speed.predicted),
        "limit": estimate.speed.limit,
    }


def write_guide(folder: pathlib.Path, guide: ScaleGuide, name: str, command: str) -> None:
    """Writes scale_guide.md and scale_guide.png into a folder that exists."""
    guide_figure(folder / PLOT, guide)
    write_atomically(folder / MARKDOWN, guide_markdown(guide, name, command))


def guide_figure(path: pathlib.Path, guide: ScaleGuide) -> None:
    """Draws the memory of each rung as a divided bar, with the card and the claims; beside it memory over size."""
    if guide.sizes:
        figure, (axes, beside) = new_figure((12, 4.6), columns=2)
        draw_sizes(beside, guide)
    else:
        figure, axes = new_figure((8, 4.6))
    draw_rungs(axes, guide)
    save_figure(figure, path)


def draw_rungs(axes: Any, guide: ScaleGuide) -> None:
    """Draws divided bars, one per rung."""
    bottoms = [0.0] * len(guide.rungs)
    for part, colour in SHADES.items():
        heights = [memory_parts(rung.estimate)[part] / GIB for rung in guide.rungs]
        if any(heights):
            axes.bar(range(len(heights)), heights, bottom=bottoms, color=colour, label=part, width=0.6)
            bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    label: str | None = "claimed (GB)"
    for place, rung in enumerate(guide.rungs):
        if rung.claimed_gb:
            marks = [place] * len(rung.claimed_gb)
            axes.plot(marks, rung.claimed_gb, "D-", color="#16191f", markersize=5, label=label, zorder=3)
            label = None
    draw_capacity(axes, guide)
    axes.set_xticks(range(len(guide.rungs)), [rung.name for rung in guide.rungs], rotation=30, ha="right")
    axes.set(title="memory of each rung", ylabel="GiB per device")
    finish(axes)


def draw_sizes(axes: Any, guide: ScaleGuide) -> None:
    """Draws the need over the size of batches, one line per rung."""
    order = list(dict.fromkeys(row.size for row in guide.sizes))
    for index, name in enumerate(dict.fromkeys(row.rung for row in guide.sizes)):
        own = [row for row in guide.sizes if row.rung == name]
        needs = [row.estimate.need.total / GIB for row in own]
        axes.plot([order.index(row.size) for row in own], needs, "o-", color=PALETTE[index % len(PALETTE)], label=name)
    draw_capacity(axes, guide)
    axes.set_xticks(range(len(order)), order)
    axes.set(title="memory by longest element of a batch", xlabel="size", ylabel="GiB per device", ylim=(0, None))
    finish(axes)


def draw_capacity(axes: Any, guide: ScaleGuide) -> None:
    capacity = guide.configured.estimate.capacity / GIB
    axes.axhline(capacity, color="#c22f2f", linestyle="--", linewidth=1.2, label=f"memory of the card, {capacity:.1f}")


def finish(axes: Any) -> None:
    axes.legend(frameon=False, fontsize=8)
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
