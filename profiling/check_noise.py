"""Runs the same sweep twice and compares the results; checks that a planted slow-down is found.

  python profiling/check_noise.py [--study=profiling/sweeps/cpu.toml] [--output_dir=runs/check_noise]

1. The study is run twice: the intervals of the two must overlap in at least 90 % of rows, and num_workers must have no
effect by construction where pipeline=device loads nothing.
2. Two trials that run the same program from the same pipeline are measured in turn, many times. Both wait for each step
to be complete, and one of them a tenth of that time longer (profiling/faulty_sweep.py). It must be found slower, by
10 % within the interval (widened by 1 %).

Measurements are kept, and the same command continues. Exit code 1 if anything failed.
"""

import argparse
import functools
import json
import pathlib
import subprocess
import sys
from typing import Any

from faulty_sweep import WAITS

from jepa_jax.base.console import Console
from jepa_jax.cli.command import Command, Result
from jepa_jax.cli.flags import Parser
from jepa_jax.tuning.knob_effects import knob_effects
from jepa_jax.tuning.rows import SweepRow
from jepa_jax.tuning.speed_statistics import SpeedRatio, compare_speeds, fit_speeds

FAULTY_SWEEP = pathlib.Path(__file__).with_name("faulty_sweep.py")
OVERLAP = 0.9
WIDER = 0.01
SLOWED = 1  # of the two trials, numbered from 0


def add_flags(parser: Parser) -> None:
    parser.add_flag("study", "FILE", "study of num_workers, with pipeline=device too", "profiling/sweeps/cpu.toml")
    parser.add_flag("output_dir", "DIR", "folder of the results", "runs/check_noise")
    parser.add_flag("repeats", "N", "repeats of the study; by default its own", kind=int, least=2)
    parser.add_flag("max_batches", "N", "measured batches of a trial; by default the study's own", kind=int, least=2)
    parser.add_flag("slow_batch_size", "N", "batch size of the slowed trial and its twin", 64, least=2)
    parser.add_flag("slow_repeats", "N", "repeats of each of the two", 24, least=2)


def check_noise(arguments: argparse.Namespace, console: Console) -> Result:
    folder = pathlib.Path(arguments.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    given = {name: getattr(arguments, name) for name in ("repeats", "max_batches")}
    more = [f"--{name}={value}" for name, value in given.items() if value is not None]
    sweep = functools.partial(run_sweep, arguments.study)
    sweeps = [sweep(folder / f"{name}.json", *more) for name in ("first", "second")]
    overlaps = [
        overlap(a["samples_per_sec_ci95"], b["samples_per_sec_ci95"])
        for a, b in zip(*(document["rows"] for document in sweeps), strict=True)
    ]
    workers = [idle_knob(document["rows"]) for document in sweeps]
    twins = sweep(
        folder / "slowed.json", *more, "--pipelines=device", f"--batch_sizes={arguments.slow_batch_size}",
        "--num_workers=0,1", f"--repeats={arguments.slow_repeats}", faults=f"{1 - SLOWED}:wait,{SLOWED}:slow",
    )  # fmt: skip
    found = slow_down(twins["rows"])
    slower_by = WAITS["slow"]
    right = 1 / (1 + slower_by)
    lines = [entry["text"] for entry in workers]
    lines.append(f"slowed by {slower_by:.0%}, so {right:.3f}x is right: measured {found}")
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
    passed = all(checks.values())
    return Result([{**figures, **checks, "passed": passed}], "\n".join(lines), 0 if passed else 1)


def run_sweep(study: str, output: pathlib.Path, *more: str, faults: str = "") -> dict[str, Any]:
    """Runs a sweep of the study and returns its document."""
    flags = [f"--faults={faults}", f"--study={study}", f"--output_json={output}", "--resume", *more]
    subprocess.run([sys.executable, str(FAULTY_SWEEP), *flags], check=True, stdout=subprocess.DEVNULL)
    return json.loads(output.read_text())


def overlap(a: list[float] | None, b: list[float] | None) -> bool:
    """Returns whether two intervals overlap."""
    return a is not None and b is not None and a[0] <= b[1] and b[0] <= a[1]


def slow_down(rows: list[dict[str, Any]]) -> SpeedRatio:
    """Compares the slowed trial with its twin, which differs from it in the number of workers alone."""
    measured = [SweepRow.from_dict(row) for row in rows]
    return compare_speeds(measured[SLOWED], measured[1 - SLOWED], fit_speeds(measured))


def idle_knob(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns what a sweep finds about num_workers where nothing is loaded."""
    measured = [SweepRow.from_dict(row) for row in rows]
    kept = [row for row in measured if row.combination.pipeline == "device"]
    return next(entry for entry in knob_effects(kept, fit_speeds(measured)) if entry["knob"] == "num_workers")


if __name__ == "__main__":
    sys.exit(Command("profiling/check_noise.py", __doc__, add_flags, check_noise, program="python").main())
