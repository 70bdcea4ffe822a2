"""Runs the same sweep twice and compares the results; checks that a planted slow-down is found.

  python profiling/check_noise.py [--study=profiling/sweeps/cpu.toml] [--output_dir=runs/check_noise]

1. The study is run twice: the intervals of the two have to overlap in at least 90 % of rows, and num_workers has to
have no effect by construction where pipeline=device loads nothing.
2. Two trials that run the same program from the same pipeline are measured in turn, many times. Both wait for each step
to be complete, and one of them a tenth of that time longer (profiling/faulty_sweep.py). It has to be found slower, by
10 % within the interval (widened by 1 %).

Measurements are kept, and the same command continues. Exit code 1 if anything failed.
"""

import argparse
import json
import pathlib
import shlex
import subprocess
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from faulty_sweep import WAITS

from jepa_jax.base.console import Console
from jepa_jax.cli.command import Command, Result
from jepa_jax.cli.flags import Parser

if TYPE_CHECKING:
    from jepa_jax.tuning.rows import SweepRow
    from jepa_jax.tuning.speed_statistics import SpeedRatio

OVERLAP = 0.9
WIDER = 0.01
SLOWED = 1  # of the two trials, numbered from 0


def add_flags(parser: Parser) -> None:
    parser.add_flag("study", "FILE", "study that sweeps num_workers, also with pipeline=device",
                    "profiling/sweeps/cpu.toml")  # fmt: skip
    parser.add_flag("output_dir", "DIR", "folder of the results", "runs/check_noise")
    parser.add_flag("slow_batch_size", "N", "batch size of the trial that is slowed, and of its twin", 64, least=1)
    parser.add_flag("slow_repeats", "N", "repeats of each of the two", 24, least=2)
    parser.add_flag("sweep_flags", "FLAGS", "further flags of jepa-jax sweep, separated by spaces", "")


def check(arguments: argparse.Namespace, console: Console) -> Result:
    folder = pathlib.Path(arguments.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    given = [f"--study={arguments.study}", "--resume", *shlex.split(arguments.sweep_flags)]
    sweeps = [sweep(folder / f"{name}.json", given) for name in ("first", "second")]
    overlaps = [
        overlap(a["samples_per_sec_ci95"], b["samples_per_sec_ci95"])
        for a, b in zip(*(document["rows"] for document in sweeps), strict=True)
    ]
    workers = [idle_knob(document["rows"]) for document in sweeps]
    for entry in workers:
        console.line(entry["text"])
    pair = ["--pipelines=device", "--num_workers=0,1"]
    size = [f"--batch_sizes={arguments.slow_batch_size}", f"--repeats={arguments.slow_repeats}"]
    faults = f"{1 - SLOWED}:wait,{SLOWED}:slow"
    twins = sweep(folder / "slowed.json", [*given, *pair, *size], faults=faults)
    found = slow_down(twins["rows"])
    slower_by = WAITS["slow"]
    right = 1 / (1 + slower_by)
    checks = {
        "overlapping": sum(overlaps) / len(overlaps) >= OVERLAP,
        "idle_knob_named": all(entry["effect"] == "none by construction" for entry in workers),
        "slow_down_found": found.verdict == "slower",
        "slow_down_right": found.low - WIDER <= right <= found.high + WIDER,
    }
    figures = {
        "rows": len(overlaps),
        "rows_overlapping": sum(overlaps),
        "noise_percent": [document["conclusion"]["noise_percent"] for document in (*sweeps, twins)],
        "slow_down": found.to_dict(),
    }
    text = f"slowed by {slower_by:.0%}, so {right:.3f}x is right: measured {found}"
    passed = all(checks.values())
    return Result([{**figures, **checks, "passed": passed}], text, 0 if passed else 1)


def sweep(output: pathlib.Path, given: Sequence[str], faults: str = "") -> dict[str, Any]:
    """Runs `jepa-jax sweep`, with faults if there are any, and returns its document."""
    script = pathlib.Path(__file__).with_name("faulty_sweep.py")
    command = [sys.executable, str(script), f"--faults={faults}", f"--output_json={output}", *given]
    subprocess.run(command, check=True, stdout=sys.stderr)
    return json.loads(output.read_text())


def overlap(a: list[float] | None, b: list[float] | None) -> bool:
    """Returns whether two intervals overlap."""
    return a is not None and b is not None and a[0] <= b[1] and b[0] <= a[1]


def read_rows(rows: list[dict[str, Any]]) -> list["SweepRow"]:
    from jepa_jax.tuning.rows import SweepRow

    return [SweepRow.from_dict(row) for row in rows]


def slow_down(rows: list[dict[str, Any]]) -> "SpeedRatio":
    """Compares the slowed trial with its twin, which differs from it in the number of workers alone."""
    from jepa_jax.tuning.speed_statistics import compare_speeds, fit_speeds

    measured = read_rows(rows)
    return compare_speeds(measured[SLOWED], measured[1 - SLOWED], fit_speeds(measured))


def idle_knob(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns what a sweep finds about num_workers where nothing is loaded."""
    from jepa_jax.tuning.knob_effects import knob_effects
    from jepa_jax.tuning.speed_statistics import fit_speeds

    measured = read_rows(rows)
    kept = [row for row in measured if row.combination.pipeline == "device"]
    return next(entry for entry in knob_effects(kept, fit_speeds(measured)) if entry["knob"] == "num_workers")


if __name__ == "__main__":
    command = Command("profiling/check_noise.py", __doc__, add_flags, check, program="python")
    sys.exit(command.main())
