"""Writes docs/results/gpu_plans.md: what the configs need on the GPUs they are meant for, compiled without any GPU.

    python profiling/make_gpu_plans.py [--only=rapid,full]

Plans are kept (see docs/guides/plan.md), so that a second run compiles only what has changed. With --only, the rows of
other configs stay as they are. Configs that were not planned are named.
"""

import dataclasses
import pathlib
import re
import sys
from collections.abc import Collection, Iterator, Sequence
from importlib import metadata
from typing import TYPE_CHECKING

from jepa_jax.base.console import Console
from jepa_jax.base.errors import UserError
from jepa_jax.base.files import write_atomically
from jepa_jax.cli.command import Command, Result
from jepa_jax.cli.flags import Arguments, Parser
from jepa_jax.runtime import platforms

if TYPE_CHECKING:
    from jepa_jax.planning.planner import Estimate, Plan

OUT = pathlib.Path(__file__).resolve().parents[1] / "docs" / "results" / "gpu_plans.md"
ONE, EIGHT = "1x1x1", "1x1x8"
LARGE = [("a100-80,h100", ONE), ("a100-80,h100", EIGHT)]
WANTED = {
    "rapid": [("rtx4090", ONE)],
    "ijepa_in1k_vitb": LARGE,
    "emberformer_small": [("rtx3090", ONE)],
    "emberformer": [("rtx3090", ONE)],
    "full": [("rtx4090", ONE)],
    "jepa_pretrain_gpu": [("a6000", ONE)],
    "vicreg_cifar10": [("rtx4090", ONE)],
    "lejepa_imagenette": [("rtx4090", ONE)],
    "ijepa_cifar10_gpu": [("rtx4090", ONE)],
    "emp_ssl_cifar10": [("rtx4090", ONE)],
    "mae_cifar10": LARGE,
    "lejepa_in1k": [("a100-80", EIGHT)],
    "hjepa_quick_val": LARGE,
    "hjepa_20epoch": LARGE,
    "hjepa_100epoch": LARGE,
    "video_jepa_mnist": [("rtx4090", ONE)],
    "vjepa_vitl": [("h100", EIGHT)],
    "two_rooms": [("rtx4090", ONE)],
    "lewm_two_rooms": [("rtx4090", ONE)],
}
BATCHES = (512, 1024, 2048, 4096)  # of `rapid`, for the table of memory against batch
CLAIMS = {
    "rapid": "~22 GB",
    "jepa_pretrain_gpu": "~44 GB",
    "emberformer_small": "2.7 GB",
    "emberformer": "12-14 GB",
}
COLUMNS = (
    "config", "GPU", "batch / parts", "peak", "without recomputing", "needed", "memory", "verdict", "largest batch",
    "predicted, images/s", "nine of ten within", "most time", "reference's own figure",
)  # fmt: skip


BATCH_SECTION = "## Memory against batch"


@dataclasses.dataclass
class Results:
    """What has been planned so far, as lines of Markdown; each names its config first."""

    rows: list[str] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    failures: list[str] = dataclasses.field(default_factory=list)
    batches: list[str] = dataclasses.field(default_factory=list)  # the section about BATCHES

    @classmethod
    def of_page(cls, text: str, replaced: Collection[str]) -> "Results":
        """Returns what a page holds that was written before, without the configs that are planned anew."""
        lines = [line for line in text.splitlines() if config_of(line) not in replaced]
        bullets = [line for line in lines if line.startswith("- `")]
        batches = re.search(rf"^{BATCH_SECTION}$.*?(?=^## |^Not planned yet|\Z)", text, re.MULTILINE | re.DOTALL)
        return cls(
            rows=[line for line in lines if line.startswith("| `")],
            notes=[line for line in bullets if " fits with " in line],
            failures=[line for line in bullets if " fits with " not in line],
            batches=batches[0].splitlines() if batches and "rapid" not in replaced else [],
        )

    def sort(self) -> None:
        """Puts the lines into the order of WANTED."""
        order = list(WANTED)
        for lines in (self.rows, self.notes, self.failures):
            lines.sort(key=lambda line: order.index(config_of(line)))


def config_of(line: str) -> str:
    """Returns the config that a line is about; "" if none."""
    match = re.match(r"(?:\||-) `(\w+)`", line)
    return match[1] if match and match[1] in WANTED else ""


def add_flags(parser: Parser) -> None:
    parser.add_flag("out", "FILE", "file to write", str(OUT))
    parser.add_flag(
        "only", "LIST", "configs to plan; the others stay as they are in --out (by default all are planned)", ""
    )
    parser.add_switch("largest", "look for the largest batches, which takes most of the time", default=True)


def make_page(arguments: Arguments, console: Console) -> Result:
    platforms.prepare_to_plan()
    names = arguments.only.split(",") if arguments.only else list(WANTED)
    if unknown := set(names) - set(WANTED):
        raise UserError(f"--only={arguments.only}: {', '.join(unknown)} is not one of {', '.join(WANTED)}")
    out = pathlib.Path(arguments.out)
    results = Results.of_page(out.read_text(), names) if arguments.only and out.exists() else Results()
    for _ in plan_all(names, results, console, largest=arguments.largest):
        write_atomically(arguments.out, page(results, finished=False))  # a run that is stopped leaves what it has
    write_atomically(arguments.out, page(results, finished=True))
    counts = {"rows": len(results.rows), "failures": len(results.failures), "absent": absent()}
    return Result([{**counts, "file": out.name}], "\n".join(results.rows))


def absent() -> list[str]:
    """Returns the wanted configs that there are not."""
    from jepa_jax.config.recipe import shipped_recipes

    return [name for name in WANTED if name not in shipped_recipes()]


def plan_all(names: list[str], results: Results, console: Console, *, largest: bool) -> Iterator[None]:
    """Adds the plans of configs to `results`, yielding after each of their targets."""
    from jepa_jax.config.recipe import assume_gpus
    from jepa_jax.planning.plan_command import PlanOptions, make_plans
    from jepa_jax.program.config import load_config

    for name in (name for name in names if name not in absent()):
        for gpu, topology in WANTED[name]:
            batches = BATCHES if name == "rapid" else ()
            searched = {"variants": False, "loader": False, "largest": largest}
            options = PlanOptions((gpu,), topology=topology, batch_sizes=batches, **searched)
            try:
                with assume_gpus():
                    config = load_config(name)
                plans, failed, _ = make_plans(config, options, console)
            except UserError as error:
                results.failures.append(f"- `{name}` on {gpu}, {topology}: {error}")
                continue
            results.failures += [f"- `{name}` on {one.request.gpu.key}, {topology}: {one.reason}" for one in failed]
            for plan in plans:
                results.rows.append(table_row(name, plan))
                results.notes += ways_out_notes(name, plan)
                if plan.batches:
                    results.batches = batch_section(plan.batches)
            results.sort()
            yield


def table_row(name: str, plan: "Plan") -> str:
    from jepa_jax.base.text import gib
    from jepa_jax.reports.plan_text import largest_text

    estimate, request = plan.estimate, plan.request
    count = f"{request.devices} x " if request.devices > 1 else ""
    parts = request.config.train.accum_steps
    speed = estimate.speed
    cells = [
        f"`{name}`",
        f"{count}{request.gpu.name.removeprefix('NVIDIA ').removeprefix('GeForce ')}",
        f"{estimate.batch_size:,}" + (f" / {parts}" if parts > 1 else ""),
        gib(estimate.need.peak),
        gib(estimate.unlimited_peak) if estimate.facts.recomputed else "the same",
        gib(estimate.need.total),
        gib(estimate.capacity),
        estimate.verdict,
        largest_text(plan.largest[0][1]),
        f"{speed.images_per_sec:,.0f}",
        f"{100 * speed.factors.p90_error:.0f} %" + ("" if speed.factors.measured else " (unmeasured)"),
        speed.limit,
        CLAIMS.get(name, ""),
    ]
    return "| " + " | ".join(cells) + " |"


def ways_out_notes(name: str, plan: "Plan") -> list[str]:
    """Returns what makes a config fit that does not fit as it is."""
    from jepa_jax.base.text import gib

    return [
        f"- `{name}` on {plan.request.devices} x {plan.request.gpu.key} fits with {way.label}: "
        f"{gib(way.need.total)} of {gib(way.capacity)}, {way.speed.images_per_sec:,.0f} images/s"
        for way in plan.ways_out
    ]


def page(results: Results, *, finished: bool) -> str:
    versions = [f"{name} {metadata.version(name)}" for name in ("jax", "jax-cuda12-pjrt", "nvidia-cuda-nvcc-cu12")]
    lines = [
        "# Plans for GPUs",
        "",
        *([] if finished else ["**Unfinished**: the command below was stopped.", ""]),
        "```",
        "python profiling/make_gpu_plans.py",
        "```",
        "",
        f"Compiled, not measured: no GPU took part. {', '.join(versions)}.",
        "The figures depend on program and compiler, not on the machine that compiles. How to read and repeat them:",
        "[guide](../guides/plan.md).",
        "",
        "| " + " | ".join(COLUMNS) + " |",
        "|---" * len(COLUMNS) + "|",
        *results.rows,
        "",
        *explanation(),
        "",
        *results.batches,
    ]
    if results.notes:
        lines += ["## Alternatives", "", "For configs that do not fit as they are; each was compiled.", ""]
        lines += [*results.notes, ""]
    if results.failures:
        lines += ["## Not planned", "", *results.failures, ""]
    planned = {config_of(line) for line in (*results.rows, *results.failures)}
    if missing := [name for name in WANTED if name not in planned]:
        lines += [f"Not planned yet: {', '.join(missing)}.", ""]
    return "\n".join(lines).rstrip() + "\n"


def explanation() -> list[str]:
    """Returns the meaning of the columns."""
    from jepa_jax.planning import estimate
    from jepa_jax.runtime.allocator import POOL_FRACTION

    workspace = f"{estimate.WORKSPACE_MOST_BYTES >> 20} MiB"
    return [
        "- **peak**: memory of one device in the step as compiled for the memory of this card, a lower bound: what",
        "  only a real device decides, such as the workspace of cuDNN's convolutions, is not in it. XLA recomputes",
        "  values to stay within about 95 % of the pool; **without recomputing** is the peak if it kept them.",
        "- **needed**: peak, data kept on the device and a margin: for the workspace of convolutions what the largest",
        f"  one reads and writes, at most {workspace}; {100 * estimate.FRAGMENTATION:.0f} % for fragmentation.",
        f"- **memory**: what JAX takes of the card, {100 * POOL_FRACTION:.0f} %; CUDA and NCCL have the rest.",
        f"- **verdict**: fits up to {100 * estimate.FITS_BELOW:.0f} % of that, tight up to 100 %.",
        "- **largest batch**: over all devices, compiled and found to fit; the config is otherwise the same.",
        "- **predicted**: the sum over kernels of the longer of products and traffic, at the shares of the peak rates",
        "  that published measurements show, and launches and exchanges. The next column is how far nine of ten",
        "  predictions of unseen measurements were off, doubled where no such program was measured:",
        "  [predictions](predictions.md). **most time** is the kind of kernel that takes the most of it.",
        "- References count what their own programs take, their allocator's reserve included; ours is another program.",
    ]


def batch_section(rows: "Sequence[Estimate]") -> list[str]:
    """Returns a table of peak against batch, beside the straight line that fits the peaks without recomputing."""
    import numpy as np

    rows = sorted(rows, key=lambda row: row.batch_size)
    sizes = np.array([row.batch_size for row in rows])
    kept = np.array([row.unlimited_peak for row in rows], float)
    slope, fixed = np.polyfit(sizes, kept, 1)
    lines = [
        BATCH_SECTION,
        "",
        f"`rapid` on an RTX 4090: {slope / 2**20:.2f} MiB per image and {fixed / 2**30:.2f} GiB besides, as long as",
        "XLA recomputes nothing.",
        "",
        "| batch | peak | without recomputing | off the line |",
        "|---|---|---|---|",
    ]
    for row, size, peak in zip(rows, sizes, kept, strict=True):
        off = 100 * (peak / (fixed + slope * size) - 1)
        cells = (f"{size:,}", f"{row.need.peak / 2**30:.2f} GiB", f"{peak / 2**30:.2f} GiB", f"{off:+.2f} %")
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


if __name__ == "__main__":
    sys.exit(Command("profiling/make_gpu_plans.py", __doc__, add_flags, make_page, program="python").main())
