"""Writes docs/results/gpu_programs.md: every recipe compiled for nine GPUs, none of which has to be there.

    python profiling/make_gpu_programs.py [--part=matrix|comparison|page] [--only=rapid,full]

The matrix says for each recipe and card whether the step compiles, whether it fits, and how fast it is predicted to be;
the comparison repeats the figures of an earlier commit (profiling/results/gpu_programs.json). A cell of the matrix is
one compilation; it is kept in profiling/results/gpu_matrix.json at once, so that a script that was stopped goes on with
the next cell. Cells that could not be compiled are tried again. `page` compiles nothing: it predicts the speeds of all
kept programs anew and writes the page.
"""

import dataclasses
import pathlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from programs_page import CARDS, key_of, page

from jepa_jax.base.console import Console
from jepa_jax.base.errors import UserError
from jepa_jax.base.files import read_json, read_json_or_empty, write_atomically, write_json
from jepa_jax.cli.command import Command, Result
from jepa_jax.cli.flags import Arguments, Parser
from jepa_jax.runtime import platforms

if TYPE_CHECKING:
    from jepa_jax.planning.planner import Estimate, Planner
    from jepa_jax.planning.step_compiler import Request

ROOT = pathlib.Path(__file__).resolve().parents[1]
OUT, ROWS = ROOT / "docs/results/gpu_programs.md", ROOT / "profiling/results/gpu_matrix.json"
COMPARISON = ROOT / "profiling/results/gpu_programs.json"
SAME = {"a6000": "rtx3090", "l4": "rtx4090"}  # cards of one compute capability run the same program
# Cards whose multiprocessors have the same threads and (nearly) the same shared memory: until a cell is compiled, it is
# predicted from the program of this card.
RELATED = {"rtx3090": "rtx4090", "a6000": "rtx4090", "rtx5090": "rtx4090", "h100": "a100-80", "v100-16": "t4"}
ROUNDS = (("a100-80",), ("rtx4090", "l4"), ("t4",), ("rtx3090", "a6000"), ("h100",), ("v100-16",), ("rtx5090",))
FIRST = (
    "rapid", "quickstart", "lejepa_in1k", "ijepa_in1k_vitb", "emberformer", "mae_cifar10", "hjepa_quick_val",
    "ijepa_cifar10_gpu", "full", "image_jepa", "jepa_pretrain_gpu", "emp_ssl_cifar10", "vjepa_vitl", "two_rooms",
    "lejepa_imagenette", "image_jepa_sigreg", "hjepa_20epoch", "hjepa_100epoch", "emberformer_small", "vicreg_cifar10",
)  # fmt: skip
HOPELESS = 1.5  # times the pool: programs that need so much on another card come last, XLA tries long to shrink them

Row = dict[str, Any]  # what the page says of a recipe on a card


def add_flags(parser: Parser) -> None:
    parser.add_choice("part", ("matrix", "comparison", "page"), "what to compile; page compiles nothing", "matrix")
    parser.add_flag("out", "FILE", "page to write", str(OUT))
    parser.add_flag("rows", "FILE", "cells of the matrix", str(ROWS))
    parser.add_flag("only", "LIST", "recipes to compile", "")


def make_page(arguments: Arguments, console: Console) -> Result:
    platforms.prepare_to_plan()
    from jepa_jax.config.recipe import shipped_recipes

    names = sorted(shipped_recipes())
    wanted = arguments.only.split(",") if arguments.only else names
    if unknown := set(wanted) - set(names):
        raise UserError(f"--only={arguments.only}: {', '.join(unknown)} is not one of {', '.join(names)}")
    rows, compared = read_json_or_empty(arguments.rows), read_json(COMPARISON, "it is part of the repository")
    if arguments.part == "matrix":
        for key in cells(wanted, rows):
            rows[key] = row_of(key, console)
            rows |= related_rows(key, rows)
            write_json(arguments.rows, rows)
            write_atomically(arguments.out, page(names, rows, compared))
    elif arguments.part == "comparison":
        for key in (key for key in compared["rows"] if key.split()[0] in wanted):
            compared.setdefault("now", {})[key] = row_of(key, console)
            write_json(COMPARISON, compared)
    else:
        predict_anew(rows), predict_anew(compared.get("now", {}))
        write_json(arguments.rows, rows)
        write_json(COMPARISON, compared)
    write_atomically(arguments.out, page(names, rows, compared))
    failed = [key for key, row in rows.items() if "error" in row]
    compiled = sum("from" not in row for row in rows.values()) - len(failed)
    count = {"cells": len(names) * len(CARDS), "compiled": compiled, "related": len(rows) - compiled - len(failed)}
    return Result([{**count, "failed": failed}], pathlib.Path(arguments.out).name)


def cells(names: list[str], rows: dict[str, Row]) -> Iterator[str]:
    """Yields the cells that are not compiled, the most wanted first; `rows` may grow meanwhile."""
    from jepa_jax.runtime.hardware import load_table

    table, later = load_table(), []
    order = [name for name in FIRST if name in names] + [name for name in names if name not in FIRST]
    for key in (key_of(name, card) for cards in ROUNDS for name in order for card in cards):
        if key in rows and not {"error", "from"} & rows[key].keys():
            continue
        name, card, _ = key.split()
        needs = [row["peak_gib"] for row in rows.values() if row.get("recipe") == name]
        if needs and min(needs) * 2**30 > HOPELESS * table[card].memory_bytes:
            later.append(key)
        else:
            yield key
    yield from later


def row_of(key: str, console: Console) -> Row:
    """Returns what the compilation of a recipe for a card shows."""
    from jepa_jax.planning.planner import Planner
    from jepa_jax.planning.step_compiler import StepCompiler, default_folder
    from jepa_jax.runtime.hardware import load_table

    request, data = request_of(key)
    compiler = StepCompiler(data, default_folder(), on_compile=lambda what: console.line(f"{key}: {what}"))
    planner = Planner(compiler, load_table())
    try:
        estimate = estimate_of(planner, request)
    except Exception as error:  # whatever it is: the other cells count too
        return {"recipe": key.split()[0], "error": f"{type(error).__name__}: {str(error)[:300]}"}
    facts_file(key).parent.mkdir(parents=True, exist_ok=True)
    write_json(facts_file(key), dataclasses.asdict(estimate.facts))
    return as_row(estimate, key)


def request_of(key: str) -> "tuple[Request, Any]":
    """Returns the request of a cell, and the facts of its data."""
    from jepa_jax.config.recipe import assume_gpus
    from jepa_jax.data.facts import data_facts
    from jepa_jax.planning.step_compiler import Request
    from jepa_jax.program.config import load_config
    from jepa_jax.runtime.hardware import load_table

    name, card, topology = key.split()
    with assume_gpus():
        config = load_config(name)
    data = data_facts(config.data, assume=True)
    return Request(config, load_table()[card], topology, data), data


def estimate_of(planner: "Planner", request: "Request") -> "Estimate":
    """Returns the estimate of a request, from the program of a card like its own if XLA does not recompute there."""
    other = SAME.get(request.gpu.key)
    if other is None:
        return planner.estimate(request)
    found = planner.estimate(request.changed({"gpu": planner.table[other]}))
    return planner.estimate(request) if found.facts.recomputed else planner.with_facts(request, found.facts)


def related_rows(key: str, rows: dict[str, Row]) -> dict[str, Row]:
    """Returns rows of cards for which a program stands until theirs is compiled: it fits them, or is far too large."""
    name, card, topology = key.split()
    found: dict[str, Row] = {}
    if "error" in rows[key]:
        return found
    for other in CARDS:
        if (cell := key_of(name, other)) not in rows:
            row = as_row(estimate := kept_estimate(key, f"{name} {other} {topology}"), key)
            runs = RELATED.get(other) == card and row["verdict"] == "fits" and not row["recomputed"]
            if runs or estimate.facts.peak_bytes > HOPELESS * estimate.capacity:
                found[cell] = {**row, "from": card}
    return found


def facts_file(key: str) -> pathlib.Path:
    """Returns the file that keeps the program of a cell, on this machine."""
    from jepa_jax.planning.step_compiler import default_folder

    return default_folder() / "gpu_programs" / f"{key.replace(' ', '_')}.json"


def kept_estimate(program: str, key: str) -> "Estimate":
    """Returns the estimate of a cell from the kept program of that cell or of another."""
    from jepa_jax.compiled.kernels import Kernel
    from jepa_jax.planning.planner import Planner
    from jepa_jax.planning.step_compiler import StepCompiler, StepFacts
    from jepa_jax.runtime.hardware import load_table

    kept = read_json(facts_file(program), "compile it again")
    facts = StepFacts(**{**kept, "kernels": [Kernel(*one) for one in kept["kernels"]]})
    request, data = request_of(key)
    return Planner(StepCompiler(data, None), load_table()).with_facts(request, facts)


def predict_anew(rows: dict[str, Row]) -> None:
    """Predicts the speeds of rows whose programs are kept on this machine, with the factors of now."""
    for key, row in rows.items():
        name, _, topology = key.split()
        program = f"{name} {row['from']} {topology}" if "from" in row else key
        if "error" not in row and facts_file(program).exists():
            row |= {**as_row(kept_estimate(program, key), key), "commit": row["commit"]}


def as_row(estimate: "Estimate", key: str) -> Row:
    from jepa_jax.runtime.provenance import git_commit

    facts = estimate.facts
    updates = ("/optimizer/", "/ema/")
    return {
        "recipe": key.split()[0],
        "commit": git_commit(),
        "verdict": estimate.verdict,
        "images_per_sec": round(estimate.speed.images_per_sec, 1),
        "gigabytes": round(facts.bytes_moved / 1e9, 3),
        "peak_gib": round(facts.peak_bytes / 2**30, 3),
        "kernels": sum(kernel.runs for kernel in facts.kernels),
        "update_kernels": sum(k.runs for k in facts.kernels if any(part in k.scope for part in updates)),
        "transposed_percent": round(100 * facts.transposed_share, 2),
        "recomputed": facts.recomputed,
        "collectives": facts.collectives,
        "precision": estimate.request.config.train.precision,
    }


if __name__ == "__main__":
    sys.exit(Command("profiling/make_gpu_programs.py", __doc__, add_flags, make_page, program="python").main())
