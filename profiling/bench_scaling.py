"""What one step exchanges between devices, and what that costs on many GPUs; compiled, nothing is run.

  python profiling/bench_scaling.py [--methods=LIST] [--plan_batches=256] [--noplan] [--markdown=FILE]

First part: steps of several methods are compiled for 1, 2, 4 and 8 virtual devices with a constant batch per device,
data-parallel, and for 8 with split parameters. Read from the programs: which collectives there are, what each device
contributes to them, and whether any of them gathers activations. Expected, data-parallel: gradients are summed once,
4 bytes per trained parameter whatever the number of devices, and nothing of the size of activations is exchanged; with
split parameters, these are gathered and their gradients scattered.

Second part: `ijepa_in1k_vitb`, and the same with a ViT-L, compiled for 8 H100s of one host and 64 of eight. Time on one
GPU is the predicted time of the step (docs/results/predictions.md); exchange is taken not to overlap with it, at the
bandwidth of NVLink inside a host and of one network card of 400 Gbit/s per GPU between hosts. Both assumptions make the
efficiency lower than it will be.

Last line: JSON with `collectives` (by method and devices), `as_expected` and `plans`. Exit code 1 if an exchange is not
as expected.
"""

import dataclasses
import os
import pathlib
import sys
from typing import Any

from jepa_jax.base.console import Console
from jepa_jax.base.files import write_atomically
from jepa_jax.cli.command import Command, Result
from jepa_jax.cli.flags import Arguments, Parser
from jepa_jax.runtime import platforms

ROOT = pathlib.Path(__file__).resolve().parents[1]
PER_DEVICE = 16  # images
COUNTS = (1, 2, 4, 8)
METHODS = ("vicreg", "sigreg", "ijepa", "hjepa", "mae", "byol", "dino", "emberformer")
SLACK = 0.10  # of the gradients: statistics of batch norm, metrics, what a batch loss needs of all embeddings
UNTRAINED = 0.02  # of the parameters: the probe of a method that computes no features for it
# Passes through the encoder whose gradients XLA sums one by one on CPUs; on GPUs it adds them first.
PASSES = {"byol": 2, "dino": 2}
MASK_BYTES = 1024  # random numbers per image that draw masks
TOPOLOGIES = ("1x1x8", "1x8x8")
ENCODERS = ("vit_base", "vit_large")


def add_flags(parser: Parser) -> None:
    parser.add_flag("methods", "LIST", "methods of the first part", ",".join(METHODS))
    parser.add_flag("plan_batches", "LIST", "images per GPU of the second part", "256")
    parser.add_switch("plan", "make the second part, which compiles for GPUs", True)
    parser.add_flag("markdown", "FILE", "file that gets both tables", "")


@dataclasses.dataclass
class Exchange:
    """What a step of a method exchanges on one mesh; bytes that each device contributes."""

    method: str
    mesh: str
    devices: int
    gradient_bytes: int
    kinds: dict[str, list[int]]  # kind: [count, bytes of operands]
    largest_gather: int  # bytes of the largest array that an all-gather makes
    largest_parameter: int  # in bytes

    def problems(self) -> list[str]:
        """Returns what is not as expected."""
        summed = self.kinds.get("all-reduce", [0, 0])[1]
        gathered = {kind: b for kind, (_, b) in self.kinds.items() if kind not in ("all-reduce", "reduce-scatter")}
        name, found = f"{self.method} on {self.mesh}", []
        if self.devices == 1:
            return [f"{name}: one device exchanges {self.kinds}"] if self.kinds else []
        if "x 1" in self.mesh:
            most = (PASSES.get(self.method, 1) + SLACK) * self.gradient_bytes + 2**16
            if not (1 - UNTRAINED) * self.gradient_bytes <= summed <= most:
                found.append(f"{name}: {summed:,} bytes are summed, gradients have {self.gradient_bytes:,}")
            if sum(gathered.values()) > SLACK * self.gradient_bytes:
                found.append(f"{name}: activations are exchanged: {gathered}")
        elif self.largest_gather > max(self.largest_parameter, MASK_BYTES * PER_DEVICE * self.devices):
            found.append(f"{name}: an array of {self.largest_gather:,} bytes is gathered")
        return found


def wide_config(name: str) -> Any:
    """Returns a small config of a method whose parameters outweigh what a batch loss exchanges of embeddings."""
    from tests.projects.wildfire.tiny import tiny_fire_config
    from tests.tiny import rival_config, tiny_config, tiny_masked_config

    if name in ("vicreg", "sigreg"):
        return tiny_config(method__loss=name, method__views=2, model__widths=(64, 256))
    if name in ("ijepa", "hjepa", "mae"):
        return tiny_masked_config(name, model__width=64, model__depth=2)
    return tiny_fire_config(model__width=32) if name == "emberformer" else rival_config(name, model__widths=(64, 256))


def exchange(name: str, data: int, fsdp: int) -> Exchange:
    """Compiles the step of a method for a mesh and reads what it exchanges."""
    import jax

    from jepa_jax.compiled.hlo import ARRAY, COLLECTIVES, operand_bytes, parse_hlo, shape_bytes
    from jepa_jax.data.contract import abstract_batch
    from jepa_jax.data.sources import open_source
    from jepa_jax.program.build import build_program
    from jepa_jax.program.config import changed_config
    from jepa_jax.runtime.mesh import make_mesh

    devices = data * fsdp
    config = changed_config(wide_config(name), {"data.batch_size": PER_DEVICE * devices, "data.num_train": 1024})
    source = open_source(config.data, "train")
    batch = abstract_batch(source.spec, config.data.batch_size)
    mesh = make_mesh(data, fsdp, jax.devices()[:devices])
    sizes = {"num_train": 1024, "num_classes": len(source.classes)}
    program = build_program(config, **sizes, sample=batch, mesh=mesh)
    hlo = parse_hlo(program.train_step.lower(program.factory.abstract, batch).compile().as_text())
    trained = [leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(program.factory.abstract.params)]
    operands: dict[str, list[int]] = {}
    gathered = 0
    for instruction, inside, times in hlo.runs():
        kind = instruction.opcode.removesuffix("-start")
        if kind in COLLECTIVES:
            total = operands.setdefault(kind, [0, 0])
            total[0] += times
            total[1] += times * operand_bytes(instruction.operands, inside)
        if instruction.opcode in ("all-gather", "all-gather-done"):
            made = [shape_bytes(array[0]) for array in ARRAY.finditer(instruction.shape)]
            gathered = max([gathered, *made])
    return Exchange(name, f"{data} x {fsdp}", devices, sum(trained), operands, gathered, max(trained))


def plan_rows(encoder: str, per_gpu: int, console: Console) -> list[dict[str, Any]]:
    """Returns what is predicted for an encoder on each topology."""
    from jepa_jax.data.facts import data_facts
    from jepa_jax.planning.absent_gpus import num_devices
    from jepa_jax.planning.planner import predicted_speed
    from jepa_jax.planning.step_compiler import Request, StepCompiler, default_folder
    from jepa_jax.program.config import load_config
    from jepa_jax.runtime.hardware import load_table

    rows = []
    gpu = load_table()["h100"]
    for topology in TOPOLOGIES:
        devices = num_devices(topology)
        config = load_config("ijepa_in1k_vitb", {"model.name": encoder, "data.batch_size": per_gpu * devices})
        compiler = StepCompiler(data_facts(config.data, assume=True), default_folder(), console.line)
        request = Request(config, gpu, topology)
        facts = compiler.all_facts([request])[0]
        speed, sent = predicted_speed(facts, request), sum(wire for _, wire in facts.collectives.values())
        exchange = speed.parts.get("exchange", 0.0)
        local = speed.seconds - exchange
        rows.append({
            "encoder": encoder, "topology": topology, "gpus": devices, "batch_size": config.data.batch_size,
            "sent_mib": sent / 2**20, "step_ms": 1e3 * local, "exchange_ms": 1e3 * exchange,
            "efficiency": local / (local + exchange),
            "images_per_sec": config.data.batch_size / (local + exchange),
            "peak_gib": facts.peak_bytes / 2**30, "collectives": facts.collectives,
        })  # fmt: skip
    return rows


def exchange_table(found: list[Exchange]) -> list[str]:
    lines = ["| method | mesh (data x fsdp) | gradients | summed | gathered | other |", "|---|---|---|---|---|---|"]
    for one in found:
        other = {kind: b for kind, (_, b) in one.kinds.items() if kind not in ("all-reduce", "all-gather")}
        summed, gathered = (one.kinds.get(kind, [0, 0]) for kind in ("all-reduce", "all-gather"))
        rest = ", ".join(f"{kind} {b / 1024:,.0f} KiB" for kind, b in other.items())
        lines.append(
            f"| {one.method} | {one.mesh} | {one.gradient_bytes / 1024:,.0f} KiB | {summed[1] / 1024:,.0f} KiB "
            f"| {gathered[1] / 1024:,.0f} KiB | {rest} |"
        )
    return lines


def plan_table(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| encoder | GPUs | batch | sent by a GPU | step of one GPU, at least | exchange | efficiency, at least |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['encoder']} | {row['topology']} H100 | {row['batch_size']:,} | {row['sent_mib']:,.0f} MiB "
            f"| {row['step_ms']:.1f} ms | {row['exchange_ms']:.1f} ms | {row['efficiency']:.1%} |"
        )
    return lines


def bench(arguments: Arguments, console: Console) -> Result:
    os.environ["XLA_FLAGS"] = (
        os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    )
    sys.path.insert(0, str(ROOT))  # for the tiny configs of the tests
    platforms.prepare_to_plan()
    meshes = [*((count, 1) for count in COUNTS), (1, 8)]
    found = []
    for method in arguments.methods.split(","):
        for data, fsdp in meshes:
            found.append(exchange(method, data, fsdp))
            console.line(f"{method} {found[-1].mesh}: {found[-1].kinds}")
    problems = [problem for one in found for problem in one.problems()]
    rows: list[dict[str, Any]] = []
    for encoder in ENCODERS if arguments.plan else ():
        for per_gpu in map(int, arguments.plan_batches.split(",")):
            rows += plan_rows(encoder, per_gpu, console)
    text = "\n".join([*exchange_table(found), "", *plan_table(rows), "", *problems])
    if arguments.markdown:
        write_atomically(arguments.markdown, text + "\n")
    result = {
        "collectives": {f"{one.method} {one.mesh}": one.kinds for one in found},
        "as_expected": not problems,
        "problems": problems,
        "plans": rows,
    }
    return Result([result], text, 0 if not problems else 1)


if __name__ == "__main__":
    command = Command("profiling/bench_scaling.py", __doc__, add_flags, bench, uses_jax=False, program="python")
    sys.exit(command.main())
