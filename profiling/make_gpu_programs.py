"""Writes docs/results/gpu_programs.md: every recipe compiled for nine GPUs, none of which has to be there.

    python profiling/make_gpu_programs.py [--only=rapid,full] [--nocompile]

A table says for each recipe and card whether the step compiles, whether it fits, and how fast it is predicted to be;
another compares some recipes with an earlier commit, whose figures are in profiling/results/gpu_programs.json. Programs
are kept by what they contain (docs/guides/plan.md): a run that was stopped goes on where it was, and what is not
compiled yet is marked. A card with the compute capability of another one has its program, unless XLA recomputes in it.
"""

import pathlib
import sys
import textwrap
from typing import TYPE_CHECKING, Any

from jepa_jax.base.console import Console
from jepa_jax.base.errors import UserError
from jepa_jax.base.files import read_json, read_json_or_empty, write_atomically, write_json
from jepa_jax.cli.command import Command, Result
from jepa_jax.cli.flags import Arguments, Parser
from jepa_jax.runtime import platforms

if TYPE_CHECKING:
    from jepa_jax.planning.planner import Estimate, Planner

ROOT = pathlib.Path(__file__).resolve().parents[1]
OUT, BEFORE = ROOT / "docs/results/gpu_programs.md", ROOT / "profiling/results/gpu_programs.json"
CARDS = ("t4", "v100-16", "rtx3090", "rtx4090", "rtx5090", "a6000", "a100-80", "h100", "l4")
ALIKE = {"a6000": "rtx3090", "l4": "rtx4090"}  # by compute capability
ONE = "1x1x1"
MISSING, FAILS = "not compiled yet", "does not compile"

Row = dict[str, Any]  # what the page says of a recipe on a card


def add_flags(parser: Parser) -> None:
    parser.add_flag("out", "FILE", "page to write", str(OUT))
    parser.add_flag("only", "LIST", "recipes to compile; of the others what is kept is shown", "")
    parser.add_switch("compile", "compile what is not kept; otherwise the page is only written anew", default=True)


def make_page(arguments: Arguments, console: Console) -> Result:
    platforms.prepare_to_plan()
    from jepa_jax.config.recipe import shipped_recipes
    from jepa_jax.planning.step_compiler import default_folder

    names, kept_at = sorted(shipped_recipes()), default_folder() / "gpu_programs.json"
    wanted = (arguments.only.split(",") if arguments.only else names) if arguments.compile else []
    if unknown := set(wanted) - set(names):
        raise UserError(f"--only={arguments.only}: {', '.join(unknown)} is not one of {', '.join(names)}")
    rows: dict[str, Row] = read_json_or_empty(kept_at)
    before = read_json(BEFORE, "it is part of the repository")
    compared = [tuple(key.split()) for key in before["rows"] if key.split()[0] in wanted]
    cells = [(name, card, ONE) for name in wanted for card in CARDS]
    for name, card, topology in [*compared, *(cell for cell in cells if cell not in compared)]:
        rows[f"{name} {card} {topology}"] = row_of(name, card, topology, console)
        write_json(kept_at, rows)
        write_atomically(arguments.out, page(names, rows, before))
    write_atomically(arguments.out, page(names, rows, before))
    failed = [key for key, row in rows.items() if "error" in row]
    done = sum(f"{name} {card} {ONE}" in rows for name in names for card in CARDS)
    return Result([{"cells": done, "of": len(names) * len(CARDS), "failed": failed}], pathlib.Path(arguments.out).name)


def row_of(name: str, card: str, topology: str, console: Console) -> Row:
    """Returns what the compilation of a recipe for a card shows."""
    from jepa_jax.config.recipe import assume_gpus
    from jepa_jax.data.facts import data_facts
    from jepa_jax.planning.planner import Planner
    from jepa_jax.planning.step_compiler import Request, StepCompiler, default_folder
    from jepa_jax.program.config import load_config
    from jepa_jax.runtime.hardware import load_table

    with assume_gpus():
        config = load_config(name)
    compiler = StepCompiler(data_facts(config.data, assume=True), default_folder(), on_compile=console.line)
    table = load_table()
    try:
        return as_row(estimate_like(Planner(compiler, table), Request(config, table[card], topology), table))
    except UserError as error:
        return {"error": str(error)}


def estimate_like(planner: "Planner", request: Any, table: Any) -> "Estimate":
    """Returns the estimate of a request, from the program of a card like its own if XLA does not recompute there."""
    alike = ALIKE.get(request.gpu.key)
    if alike is None:
        return planner.estimate(request)
    other = planner.estimate(request.changed({"gpu": table[alike]}))
    return planner.estimate(request) if other.facts.recomputed else planner.with_facts(request, other.facts)


def as_row(estimate: "Estimate") -> Row:
    facts = estimate.facts
    updates = ("/optimizer/", "/ema/")
    return {
        "verdict": estimate.verdict,
        "images_per_sec": estimate.speed.images_per_sec,
        "gigabytes": facts.bytes_moved / 1e9,
        "peak_gib": facts.peak_bytes / 2**30,
        "kernels": sum(kernel.runs for kernel in facts.kernels),
        "update_kernels": sum(k.runs for k in facts.kernels if any(part in k.scope for part in updates)),
        "transposed_percent": 100 * facts.transposed_share,
        "collectives": facts.collectives,
        "precision": estimate.request.config.train.precision,
    }


def page(names: list[str], rows: dict[str, Row], before: Row) -> str:
    from jepa_jax.runtime.hardware import load_table

    table = load_table()
    titles = [table[card].name.removeprefix("NVIDIA ").removeprefix("GeForce ") for card in CARDS]
    lines = [
        "# Programs for GPUs",
        "",
        "```",
        "python profiling/make_gpu_programs.py",
        "```",
        "",
        "Compiled, not measured: no GPU took part. Images/s are predicted ([how well](predictions.md)).",
        "",
        "## Every recipe on nine cards",
        "",
        "Predicted images/s where the step fits the 90 % of the memory that JAX takes; else **no**, and what it needs",
        "at least. Batches are those of the recipes.",
        "",
        f"| recipe | {' | '.join(titles)} |",
        "|---|" + "---:|" * len(CARDS),
    ]
    cells_of = {name: [rows.get(f"{name} {card} {ONE}") for card in CARDS] for name in names}
    for name, found in cells_of.items():
        cells = [cell_text(row) for row in found]
        if any(found):
            lines.append(f"| `{name}` | {' | '.join(cells)} |")
    if absent := [f"`{name}`" for name, found in cells_of.items() if not any(found)]:
        lines += ["", *textwrap.wrap(f"Not compiled yet: {', '.join(absent)}.", 120)]
    return "\n".join([*lines, "", *comparison(rows, before), ""])


def cell_text(row: Row | None) -> str:
    if row is None:
        return MISSING
    if "error" in row:
        return f"**{FAILS}**"
    if row["verdict"] == "does not fit":
        return f"**no** ({row['peak_gib']:.1f} GiB)"
    return f"{row['images_per_sec']:,.0f}" + (" (tight)" if row["verdict"] == "tight" else "")


FIGURES = (
    ("GB moved", "gigabytes", ",.1f"), ("peak, GiB", "peak_gib", ".2f"), ("kernels", "kernels", ",d"),
    ("of the update", "update_kernels", ",d"), ("transposes, %", "transposed_percent", ".2f"),
    ("images/s", "images_per_sec", ",.0f"),
)  # fmt: skip


def comparison(rows: dict[str, Row], before: Row) -> list[str]:
    """Returns the figures of some recipes at an earlier commit and now; speeds of both by the factors of now."""
    lines = [
        f"## Against {before['commit']}",
        "",
        "Per device and step, before -> now. *Of the update*: kernels of the optimizer and of slow copies.",
        "*Transposes*: bytes moved only to change the order of axes. Speeds are predicted with the same factors.",
        "",
        "| recipe | card | " + " | ".join(title for title, _, _ in FIGURES) + " |",
        "|---|---|" + "---:|" * len(FIGURES),
    ]
    for key, old in before["rows"].items():
        name, card, topology = key.split()
        new = rows.get(key)
        count = "" if topology == ONE else f" {topology}"
        count += f" ({new['commit']})" if new and "commit" in new else ""  # compiled before the newest change
        cells = [
            f"{old[figure]:{form}} -> " + (f"{new[figure]:{form}}" if new and "error" not in new else MISSING)
            for _, figure, form in FIGURES
        ]
        lines.append(f"| `{name}` | {card}{count} | {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    sys.exit(Command("profiling/make_gpu_programs.py", __doc__, add_flags, make_page, program="python").main())
