"""Runs the same sweep twice and compares the results; checks that a planted slow-down is found.

  python profiling/check_noise.py [--study=profiling/sweeps/cpu.toml] [--output_dir=runs/check_noise]

1. The study is run twice: the intervals of the two must overlap in at least 90 % of rows, and where pipeline=device
loads nothing, workers must not be a combination of their own.
2. Two trials that run the same program from the same pipeline are measured in turn, many times. Both wait for each step
to be complete, and one of them a tenth of that time longer (profiling/faulty_sweep.py). It must be found slower, by
10 % within the interval (widened by 1 %).

Measurements are kept, and the same command continues. Exit code 1 if anything failed.
"""

import dataclasses
import functools
import json
import os
import pathlib
import subprocess
import sys
from typing import Any

from faulty_sweep import VARIABLE, WAITS

from jepa_jax.base.console import Console
from jepa_jax.base.statistics import compare_speeds, fit_speeds
from jepa_jax.cli.command import Command, Result
from jepa_jax.cli.flags import Arguments, Parser
from jepa_jax.config.resolve import resolve
from jepa_jax.experiments import trial
from jepa_jax.experiments.rows import SweepRow
from jepa_jax.experiments.settings import Combination, TrialRequest

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


def check_noise(arguments: Arguments, console: Console) -> Result:
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
    idle = [row for document in sweeps for row in document["rows"] if row["combination"]["pipeline"] == "device"]
    twins = measure_twins(folder / "twins", sweeps[0]["header"], arguments.slow_batch_size, arguments.slow_repeats)
    model = fit_speeds(twins)
    found = compare_speeds(twins[SLOWED], twins[1 - SLOWED], model)
    slower_by = WAITS["slow"]
    right = 1 / (1 + slower_by)
    lines = [f"slowed by {slower_by:.0%}, so {right:.3f}x is right: measured {found}"]
    checks = {
        "overlapping": sum(overlaps) / len(overlaps) >= OVERLAP,
        "idle_workers_left_out": all(row["combination"]["num_workers"] == 0 for row in idle),
        "slow_down_found": found.verdict == "slower",
        "slow_down_right": found.low - WIDER <= right <= found.high + WIDER,
    }
    figures = {
        "rows": len(overlaps),
        "rows_overlapping": sum(overlaps),
        "noise_percent": [*(document["conclusion"]["noise_percent"] for document in sweeps), model.noise_percent],
        "slow_down": found.to_dict(),
    }
    passed = all(checks.values())
    return Result([{**figures, **checks, "passed": passed}], "\n".join(lines), 0 if passed else 1)


def run_sweep(study: str, output: pathlib.Path, *more: str) -> dict[str, Any]:
    """Runs a sweep of the study and returns its document."""
    flags = ["--faults=", f"--study={study}", f"--output_json={output}", "--resume", *more]
    subprocess.run([sys.executable, str(FAULTY_SWEEP), *flags], check=True, stdout=subprocess.DEVNULL)
    return json.loads(output.read_text())


def overlap(a: list[float] | None, b: list[float] | None) -> bool:
    """Returns whether two intervals overlap."""
    return a is not None and b is not None and a[0] <= b[1] and b[0] <= a[1]


def measure_twins(folder: pathlib.Path, header: dict[str, Any], batch: int, repeats: int) -> list[SweepRow]:
    """Measures two trials of the same program in turn, one of them slowed; only an idle worker tells them apart."""
    os.environ[VARIABLE] = f"{1 - SLOWED}:wait,{SLOWED}:slow"
    trial.TRIAL_COMMAND = (sys.executable, str(FAULTY_SWEEP))
    own = Combination.of(resolve(header["config"]))
    counts = {name: header[name] for name in ("max_batches", "warmup_batches")}
    rows = []
    for workers in (0, 1):
        twin = dataclasses.replace(own, batch_size=batch, num_workers=workers, pipeline="device")
        rows.append(SweepRow(twin))
    for number in range(repeats):
        for index in (0, 1) if number % 2 else (1, 0):
            request = TrialRequest(header["config"], rows[index].combination, use_dummy_data=True, **counts)
            place = folder / f"{index:03d}_round{number}"
            left = trial.finished_result(place, request)
            result = left if left and left.figures else trial.run_trial(place, request, time_limit=600.0)
            rows[index] = rows[index].with_repeat(dataclasses.replace(result, round=number))
    return rows


if __name__ == "__main__":
    sys.exit(Command("profiling/check_noise.py", __doc__, add_flags, check_noise, program="python").main())
