"""Writes docs/results/gpu_programs.md: every recipe compiled for nine GPUs, none of which has to be there.

    python profiling/make_gpu_programs.py [--part=matrix|comparison|page] [--only=rapid,full]

Figures come from whole steps, which XLA optimizes, schedules and gives memory; then it is stopped, since the code of
kernels takes three quarters of the time and changes no figure. One program without a limit of memory stands for all
cards of like multiprocessors that it fits; others are optimized for their own memory. That the code of a card can be
made is shown by compiling steps to the end, with one block, eight images and all else as in the recipe.

What is found is kept in profiling/results/gpu_matrix.json at once, so that a script that was stopped goes on with the
next program; what failed is tried again. `comparison` repeats the figures of an earlier commit
(profiling/results/gpu_programs.json). `page` compiles nothing: it predicts speeds anew and writes the page.
"""

import dataclasses
import os
import pathlib
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from optimized_programs import compile_apart, optimized_text, read_notes
from programs_page import CARDS, SAME_CODE, key_of, page

from jepa_jax.base.console import Console
from jepa_jax.base.errors import UserError
from jepa_jax.base.files import read_json, read_json_or_empty, write_atomically, write_json
from jepa_jax.cli.command import Command, Result
from jepa_jax.cli.flags import Arguments, Parser
from jepa_jax.runtime import platforms

if TYPE_CHECKING:
    from jepa_jax.planning.planner import Estimate
    from jepa_jax.planning.step_compiler import Request
    from jepa_jax.runtime.hardware import Gpu

ROOT = pathlib.Path(__file__).resolve().parents[1]
OUT, ROWS = ROOT / "docs/results/gpu_programs.md", ROOT / "profiling/results/gpu_matrix.json"
COMPARISON = ROOT / "profiling/results/gpu_programs.json"
# The card whose program stands for others: before Ampere attention is XLA's and there is no bfloat16, and A100 and H100
# have more shared memory for larger blocks of attention than the rest.
STANDS_FOR = {"rtx3090": ("rtx3090", "rtx4090", "rtx5090", "a6000", "l4"), "t4": ("t4", "v100-16"),
              "a100-80": ("a100-80", "h100")}  # fmt: skip
UNLIMITED = "unlimited"  # in place of a topology: the program that keeps everything
ATTENTION = "attention"  # in place of a recipe: kernels of attention of all recipes
EARLIER_FRACTION = 0.8  # of a card's memory, for which XLA made the programs of the earlier commit
NO_CHANCE = 2.5  # times the pool: XLA halves the need of some programs, but no more
FIRST = (
    "rapid", "quickstart", "ijepa_cifar10_gpu", "mae_cifar10", "hjepa_quick_val", "emberformer", "lejepa_imagenette",
    "full", "image_jepa", "vjepa_quickstart", "two_rooms", "photos_ijepa", "photos_lejepa", "dino_quickstart",
)  # fmt: skip
CODE_FIRST = ("mae_quickstart", "quickstart", "vjepa_quickstart", "two_rooms_cpu", "ijepa_cifar10", "emberformer_cpu")
SMALL = {"model.depth": 1, "method.predictor_depth": 1, "method.decoder_depth": 1, "method.depth": 1,
         "data.batch_size": 8, "optim.reference_batch": 8, "eval.batch_size": 8, "train.accum_steps": 1}  # fmt: skip

Row = dict[str, Any]  # what is known of a recipe on a card


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
    found = {"figures": {}, "code": {}, **read_json_or_empty(arguments.rows)}
    compared = read_json(COMPARISON, "it is part of the repository")

    def write() -> None:
        write_json(arguments.rows, found)
        write_json(COMPARISON, compared)
        write_atomically(arguments.out, page(names, found, compared))

    ordered = [name for name in FIRST if name in wanted] + [name for name in wanted if name not in FIRST]
    if arguments.part == "matrix":
        for step in steps(ordered, found):
            console.line(step())
            write()
    elif arguments.part == "comparison":
        for key in (key for key in compared["rows"] if key.split()[0] in wanted):
            row = compared.setdefault("now", {})[key] = row_of(key)
            if row.get("recomputed"):  # how much depends on the memory there is, of which plans took less then
                compared.setdefault("same_pool", {})[key] = row_of(key, memory_fraction=EARLIER_FRACTION)
            write()
    else:
        predict_anew(found["figures"]), predict_anew(compared.get("now", {}))
    write()
    failed = [key for rows in found.values() for key, row in rows.items() if "error" in row]
    return Result([{part: len(rows) for part, rows in found.items()} | {"failed": failed}], arguments.out)


def steps(names: list[str], found: dict[str, dict[str, Row]]) -> Iterator[Callable[[], str]]:
    """Yields what is left to do, the most wanted first; each adds to `found` and returns a line about it."""
    figures, code = found["figures"], found["code"]

    def is_open(rows: dict[str, Row], key: str) -> bool:
        return key not in rows or "error" in rows[key]

    for group, cards in STANDS_FOR.items():
        for name in names:
            if any(is_open(figures, key_of(name, card)) for card in cards):
                yield lambda name=name, group=group: add_unlimited(name, group, figures)
        for card in CARDS if group == "rtx3090" else ():
            if card not in SAME_CODE and heads_of(figures) - set(code.get(f"{ATTENTION} {card}", {}).get("heads", ())):
                yield lambda card=card: add_attention(card, found)
    for name in sorted(names, key=lambda name: (CODE_FIRST + (name,)).index(name)):
        for card in CARDS:
            if card not in SAME_CODE and is_open(code, f"{name} {card}"):
                yield lambda name=name, card=card: add_code(name, card, code)
    for key in (key_of(name, card) for name in names for card in CARDS):
        if "unlimited" in figures.get(key, {}) and figures[key]["verdict"] == "does not fit":
            if figures[key]["peak_gib"] < NO_CHANCE * figures[key]["pool_gib"]:
                yield lambda key=key: add_limited(key, figures)


def heads_of(figures: dict[str, Row]) -> set[str]:
    """Returns the shapes of queries, keys and values, without the batch, that kernels of attention read."""
    return {heads for row in figures.values() for heads in row.get("attention", ())}


def add_attention(card: str, found: dict[str, dict[str, Row]]) -> str:
    """Adds whether attention of all recipes, with gradients, is compiled to the end for a card."""
    from jepa_jax.runtime.hardware import load_table
    from jepa_jax.runtime.provenance import git_commit

    gpu, heads, began = load_table()[card], sorted(heads_of(found["figures"])), cpu_seconds()
    with tempfile.TemporaryDirectory() as folder:
        error = compile_apart(lambda: lowered_attention(heads, gpu), pathlib.Path(folder), whole=True)
    row = {"commit": git_commit(), "heads": heads, **({"error": error} if error else {})}
    found["code"][f"{ATTENTION} {card}"] = row
    return f"attention of {len(heads)} shapes, {card}: {error or 'compiles'}, {cpu_seconds() - began:.0f} CPU s"


def lowered_attention(heads: list[str], gpu: "Gpu") -> Any:
    """Returns the gradients of attention for shapes like bf16[65,12,64], as one program."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import SingleDeviceSharding

    from jepa_jax.models.kernels.attention import self_attention
    from jepa_jax.planning.absent_gpus import absent_devices
    from jepa_jax.runtime.hardware import lowering_for

    there = SingleDeviceSharding(absent_devices(gpu, "1x1x1")[0])
    shapes = []
    for text in heads:
        dtype, _, sizes = text.rstrip("]").partition("[")
        kind = jnp.bfloat16 if dtype == "bf16" else jnp.float32
        shapes.append(jax.ShapeDtypeStruct((2, *map(int, sizes.split(","))), kind, sharding=there))

    def attend(arrays: list[Any]) -> Any:
        return sum(jnp.sum(jnp.square(self_attention(array).astype(jnp.float32))) for array in arrays)

    with lowering_for(gpu):
        return jax.jit(jax.grad(attend)).lower(shapes)


def add_unlimited(name: str, group: str, figures: dict[str, Row]) -> str:
    """Adds the rows of all cards for which one program stands."""
    request, program = request_of(key_of(name, group)), key_of(name, group, UNLIMITED)
    began = cpu_seconds()
    error = keep_program(dataclasses.replace(request, unlimited=True), program)
    for card in STANDS_FOR[group]:
        key = key_of(name, card)
        row = {"recipe": name, "error": error} if error else as_row(kept_estimate(program, key), key)
        figures[key] = {**row, "unlimited": group}
    if not error:
        figures[key_of(name, group)]["attention"] = read_json(facts_file(program), "compile it again")["attention"]
    return f"{program}: {error or figures[key]['peak_gib']}, {cpu_seconds() - began:.0f} CPU s"


def add_limited(key: str, figures: dict[str, Row]) -> str:
    began = cpu_seconds()
    figures[key] = row_of(key)
    return f"{key}: {figures[key].get('error') or figures[key]['peak_gib']}, {cpu_seconds() - began:.0f} CPU s"


def add_code(name: str, card: str, code: dict[str, Row]) -> str:
    """Adds whether a small step of a recipe is compiled to the end for a card."""
    from jepa_jax.runtime.provenance import git_commit

    began = cpu_seconds()
    with tempfile.TemporaryDirectory() as folder:
        error = compile_apart(lambda: lowered_step(small_request(name, card)), pathlib.Path(folder), whole=True)
    code[f"{name} {card}"] = {"commit": git_commit(), **({"error": error} if error else {})}
    return f"{name} {card}: {error or 'compiles'}, {cpu_seconds() - began:.0f} CPU s"


def cpu_seconds() -> float:
    return sum(os.times()[:4])


def request_of(key: str) -> "Request":
    """Returns the request of a cell."""
    from jepa_jax.config.recipe import assume_gpus
    from jepa_jax.data.facts import data_facts
    from jepa_jax.planning.step_compiler import Request
    from jepa_jax.program.config import load_config
    from jepa_jax.runtime.hardware import load_table

    name, card, topology = key.split()
    with assume_gpus():
        config = load_config(name)
    return Request(config, load_table()[card], topology, data_facts(config.data, assume=True))


def small_request(name: str, card: str) -> "Request":
    """Returns the request of a step with few blocks and images; what a kernel of attention computes is the same."""
    request = request_of(key_of(name, card))
    groups = {key: getattr(request.config, key.split(".")[0]) for key in SMALL}
    changes = {key: value for key, value in SMALL.items() if hasattr(groups[key], key.split(".")[1])}
    return request.changed(changes)


def lowered_step(request: "Request") -> Any:
    """Returns the step of a request, lowered for its GPUs."""
    from jepa_jax.data.contract import abstract_batch
    from jepa_jax.data.photos.crops import batch_spec
    from jepa_jax.planning.absent_gpus import absent_devices
    from jepa_jax.planning.step_compiler import program_for, trace_step
    from jepa_jax.runtime.hardware import lowering_for

    devices = absent_devices(request.gpu, request.topology, request.unlimited, request.memory_fraction)
    batch = abstract_batch(batch_spec(request.config, request.data.spec), request.config.data.batch_size)
    with lowering_for(request.gpu):
        return trace_step(program_for(request.config, request.data, devices), batch).lower()


def row_of(key: str, **changes: Any) -> Row:
    """Returns what the program of a cell shows, optimized for the memory of its card; changes are of its request."""
    name = " ".join([key, *changes])
    if error := keep_program(dataclasses.replace(request_of(key), **changes), name):
        return {"recipe": key.split()[0], "error": error}
    return as_row(kept_estimate(name, key), key)


def keep_program(request: "Request", name: str) -> str:
    """Keeps what XLA's notes about the program of a request show; returns an error, "" without one."""
    with tempfile.TemporaryDirectory() as folder:
        if not (error := compile_apart(lambda: lowered_step(request), pathlib.Path(folder))):
            facts_file(name).parent.mkdir(parents=True, exist_ok=True)
            kept = {"facts": facts_of(request, pathlib.Path(folder)), "attention": attention_of(pathlib.Path(folder))}
            write_json(facts_file(name), kept)
    return error


def facts_of(request: "Request", folder: pathlib.Path) -> dict[str, Any]:
    """Returns `StepFacts` of an optimized program, as far as the page needs them."""
    from jepa_jax.compiled.kernels import read_kernels
    from jepa_jax.compiled.moves import transposed_share
    from jepa_jax.data.contract import element_bytes
    from jepa_jax.planning.step_compiler import StepFacts

    hlo, peak = read_notes(folder)
    unknown = {field.name: 0 for field in dataclasses.fields(StepFacts) if field.type is int}
    batch = request.config.data.batch_size // request.devices
    facts = StepFacts(**unknown | {
        "devices": request.devices, "batch_bytes": batch * element_bytes(request.data.spec), "peak_bytes": peak,
        "largest_convolution_bytes": hlo.largest_convolution_bytes(), "kernels": read_kernels(hlo),
        "collectives": hlo.collectives(), "encoder_float32_products": [], "host_calls": hlo.host_calls(),
        "transposed_share": transposed_share(hlo),
    })  # fmt: skip
    return dataclasses.asdict(facts)


def attention_of(folder: pathlib.Path) -> list[str]:
    """Returns the shapes, without the batch, that kernels of attention read, like bf16[65,12,64]."""
    reads = re.compile(r"operand_layout_constraints=\{(\w+\[)\d+,([\d,]+\]).*attention_forward_\d+/pallas_call")
    return sorted({found[1] + found[2] for found in reads.finditer(optimized_text(folder))})


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

    kept = read_json(facts_file(program), "compile it again")["facts"]
    facts = StepFacts(**{**kept, "kernels": [Kernel(*one) for one in kept["kernels"]]})
    request = request_of(key)
    return Planner(StepCompiler(request.data, None), load_table()).with_facts(request, facts)


def predict_anew(rows: dict[str, Row]) -> None:
    """Predicts the speeds of rows whose programs are kept on this machine, with the factors of now."""
    for key, row in rows.items():
        program = key_of(row["recipe"], row["unlimited"], UNLIMITED) if "unlimited" in row else key
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
        "pool_gib": round(estimate.capacity / 2**30, 3),
        "kernels": sum(kernel.runs for kernel in facts.kernels),
        "update_kernels": sum(k.runs for k in facts.kernels if any(part in k.scope for part in updates)),
        "transposed_percent": round(100 * facts.transposed_share, 2),
        "recomputed": facts.recomputed,
        "collectives": facts.collectives,
        "precision": estimate.request.config.train.precision,
    }


if __name__ == "__main__":
    sys.exit(Command("profiling/make_gpu_programs.py", __doc__, add_flags, make_page, program="python").main())
