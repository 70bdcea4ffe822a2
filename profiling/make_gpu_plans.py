"""Writes docs/results/gpu_plans.md: what the configs need on the GPUs they are meant for, compiled without any GPU.

    python profiling/make_gpu_plans.py

Plans are kept (see docs/guides/plan.md), so that a second run takes only what has changed. A config that is not there
yet is left out and named.
"""

import pathlib
from importlib import metadata

from absl import flags

from jepa_jax.cli import commands
from jepa_jax.runtime import platforms

ROOT = pathlib.Path(__file__).resolve().parents[1]
ONE, EIGHT = "1x1x1", "1x1x8"
LARGE = [("a100-80,h100", ONE), ("a100-80,h100", EIGHT)]
WANTED = {
    "rapid": [("rtx4090", ONE)],
    "full": [("rtx4090", ONE)],
    "jepa_pretrain_gpu": [("a6000", ONE)],
    "hjepa_quick_val": LARGE,
    "hjepa_20epoch": LARGE,
    "hjepa_100epoch": LARGE,
    "mae_cifar10": LARGE,
    "ijepa_in1k_vitb": LARGE,
    "emberformer_small": [("rtx3090", ONE)],
    "emberformer_large": [("rtx3090", ONE)],
}
BATCHES = (512, 1024, 2048, 4096)  # of `rapid`, for the table of memory against batch
CLAIMS = {
    "rapid": "~22 GB",
    "jepa_pretrain_gpu": "~44 GB",
    "emberformer_small": "2.7 GB",
    "emberformer_large": "12-14 GB, later 23.8 GB",
}

_OUT = flags.DEFINE_string("out", str(ROOT / "docs" / "results" / "gpu_plans.md"), "File to write.")
_ONLY = flags.DEFINE_list("only", [], "Configs to plan, into another --out; by default all.")


def main(argv: list[str]) -> int:
    commands.refuse_arguments(argv)

    def command(console):
        with platforms.without_driver_remarks():
            import jax  # noqa: F401

        from jepa_jax.base.errors import UserError
        from jepa_jax.base.files import write_atomically
        from jepa_jax.config.schema import load_config_file
        from jepa_jax.planning.plan_command import Options, make_plans

        if _ONLY.value and flags.FLAGS["out"].using_default_value:
            raise UserError(f"--only={','.join(_ONLY.value)}: name another --out, or the page of all plans is lost")
        rows, notes, failures, absent, peaks = [], [], [], [], {}
        for name, targets in WANTED.items():
            path = ROOT / "configs" / f"{name}.py"
            if _ONLY.value and name not in _ONLY.value:
                continue
            if not path.exists():
                absent.append(name)
                continue
            for gpu, topology in targets:
                batches = BATCHES if name == "rapid" else ()
                options = Options((gpu,), topology=topology, batch_sizes=batches, variants=False, loader=False)
                try:
                    plans, _ = make_plans(load_config_file(str(path)), options, console)
                except UserError as error:
                    failures.append(f"- `{name}` on {gpu}, {topology}: {error}")
                    continue
                for plan in plans:
                    rows.append(table_row(name, plan))
                    notes += ways_out_notes(name, plan)
                    peaks |= {row.facts.batch_size: row.facts.peak_bytes for row in plan.batches}
                    console.line(rows[-1])
                # What is there stays, whatever comes.
                write_atomically(_OUT.value, page(rows, notes, failures, absent, peaks, whole=False))
        write_atomically(_OUT.value, page(rows, notes, failures, absent, peaks, whole=True))
        return {"rows": len(rows), "failures": len(failures), "absent": absent, "file": pathlib.Path(_OUT.value).name}

    return commands.run(command)


def table_row(name: str, plan) -> str:
    from jepa_jax.reports.plan_report import gib, largest_text

    row, facts, request = plan.row, plan.row.facts, plan.request
    count = f"{request.devices} x " if request.devices > 1 else ""
    low, high = row.speed.predicted
    cells = [
        f"`{name}`",
        f"{count}{request.gpu.name.removeprefix('NVIDIA ').removeprefix('GeForce ')}",
        f"{facts.batch_size:,}" + (f" / {facts.accum_steps}" if facts.accum_steps > 1 else ""),
        gib(facts.peak_bytes),
        gib(row.need.total),
        gib(row.capacity),
        row.verdict,
        largest_text(plan.largest[0][1]),
        f"{row.speed.images_per_sec:,.0f} ({row.speed.limit})",
        f"{low:,.0f}-{high:,.0f}",
        CLAIMS.get(name, ""),
    ]
    return "| " + " | ".join(cells) + " |"


def ways_out_notes(name: str, plan) -> list[str]:
    """For a config that does not fit: what does, compiled."""
    from jepa_jax.reports.plan_report import gib

    return [
        f"- `{name}` on {plan.request.devices} x {plan.request.gpu.key} fits with {way.label}: "
        f"{gib(way.need.total)} of {gib(way.capacity)}, bound {way.speed.images_per_sec:,.0f} images/s"
        for way in plan.ways_out
    ]


def batch_section(peaks: dict[int, int]) -> list[str]:
    """Peak against batch, beside the straight line that fits best."""
    import numpy as np

    sizes, bytes_ = np.array(sorted(peaks)), np.array([peaks[size] for size in sorted(peaks)], float)
    slope, fixed = np.polyfit(sizes, bytes_, 1)
    lines = [
        "## Memory against batch",
        "",
        f"`rapid` on an RTX 4090: {slope / 2**20:.2f} MiB an image and {fixed / 2**30:.2f} GiB besides.",
        "",
        "| batch | peak | off the line |",
        "|---|---|---|",
    ]
    for size, peak in zip(sizes, bytes_, strict=True):
        lines.append(f"| {size:,} | {peak / 2**30:.2f} GiB | {100 * (peak / (fixed + slope * size) - 1):+.2f} % |")
    return [*lines, ""]


def page(
    rows: list[str], notes: list[str], failures: list[str], absent: list[str], peaks: dict[int, int], *, whole: bool
) -> str:
    from jepa_jax.planning import planner

    versions = ", ".join(
        f"{name} {metadata.version(name)}" for name in ("jax", "jax-cuda12-pjrt", "nvidia-cuda-nvcc-cu12")
    )
    low, high = (f"{100 * part:.0f}" for part in planner.EFFICIENCY)
    context, workspace, collective = (
        f"{size >> 20} MiB" for size in (planner.CONTEXT_BYTES, planner.WORKSPACE_MOST_BYTES, planner.COLLECTIVE_BYTES)
    )
    columns = (
        "config", "GPU", "batch / parts", "peak", "needed", "memory", "verdict", "largest batch",
        "bound, images/s (set by)", "predicted, images/s", "reference's own figure",
    )  # fmt: skip
    lines = [
        "# Plans for GPUs",
        "",
        *([] if whole else ["**Unfinished**: the command below has not come to its end.", ""]),
        "```",
        "python profiling/make_gpu_plans.py",
        "```",
        "",
        f"Compiled, not measured: no GPU took part. {versions}.",
        "The figures depend on program and compiler, not on the machine that compiles. How to read and repeat them:",
        "[guide](../guides/plan.md).",
        "",
        "| " + " | ".join(columns) + " |",
        "|---" * len(columns) + "|",
        *rows,
        "",
        "- **peak**: memory of one device in the compiled step, a lower bound: what only a real device decides, such",
        "  as the workspace of cuDNN's convolutions, is not in it.",
        f"- **needed**: peak, data kept on the device and a margin: {context} for CUDA's context and libraries; for",
        f"  the workspace of convolutions what the largest one reads and writes, at most {workspace}; {collective} for",
        f"  collectives with more than one device; {100 * planner.FRAGMENTATION:.0f} % of the peak for fragmentation.",
        f"- **verdict**: fits up to {100 * planner.FITS_BELOW:.0f} % of the memory, tight up to 100 %.",
        "- **largest batch**: over all devices, compiled and found to fit; the config is otherwise the same.",
        "- **bound**: by roofline, the time of the products at the GPU's peak rate or of the bytes at its full",
        "  bandwidth, whichever is longer. Every kernel is taken to read and write memory; where small tensors stay in",
        "  the cache, a step may be faster.",
        f"  **predicted** is {low} to {high} % of it: an assumption about what programs reach, no measurement.",
        "- References count what their own programs take, their allocator's reserve included; ours is another program.",
        "",
    ]
    if peaks:
        lines += batch_section(peaks)
    if notes:
        lines += ["## Ways out", "", "Of configs that do not fit as they are; each was compiled.", "", *notes, ""]
    if failures:
        lines += ["## Not planned", "", *failures, ""]
    if absent:
        lines += [f"Not planned, because there is no such config yet: {', '.join(absent)}.", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    platforms.prepare_to_plan()
    commands.main(main)
