"""Runs the same sweep twice: do its intervals overlap? Is a planted slow-down found, and a knob without effect named?

    python profiling/check_noise.py [--study=profiling/sweeps/cpu.toml] [--output_dir=runs/check_noise]

1. The study is run twice: the intervals of the two have to overlap in at least 90 % of rows, and num_workers to have no
effect by construction where pipeline=device loads nothing.
2. Two trials that run the same program from the same pipeline are measured in turn, often. Both wait for each step to
be complete, and one of them a tenth of that time longer (profiling/faulty_sweep.py). It has to be found slower, by 10 %
within the interval (widened by 1 %).

What was measured is kept, and the same command continues. The last line is a JSON object; exit code 1 if anything
failed.
"""

import json
import pathlib
import subprocess
import sys
from typing import Any

from absl import app, flags

from jepa_jax.tuning.knob_effects import knob_effects
from jepa_jax.tuning.rows import SweepRow
from jepa_jax.tuning.speed_statistics import SpeedRatio, compare_speeds, fit_speeds

_STUDY = flags.DEFINE_string("study", "profiling/sweeps/cpu.toml", "Sweeps num_workers with pipeline=device too.")
_OUTPUT = flags.DEFINE_string("output_dir", "runs/check_noise", "Where results go.")
_BATCH = flags.DEFINE_integer("slow_batch_size", 64, "Of the trial that is slowed, and of its twin.", lower_bound=1)
_REPEATS = flags.DEFINE_integer("slow_repeats", 24, "Of each of the two.", lower_bound=2)

ROOT = pathlib.Path(__file__).parents[1]
OVERLAP = 0.9
WIDER = 0.01
SLOWED = 1  # of the two trials, numbered from 0


def main(argv: list[str]) -> int:
    from faulty_sweep import WAITS

    folder = pathlib.Path(_OUTPUT.value)
    folder.mkdir(parents=True, exist_ok=True)
    sweeps = [sweep(folder / f"{name}.json", *argv[1:]) for name in ("first", "second")]
    overlaps = [
        overlap(a["samples_per_sec_ci95"], b["samples_per_sec_ci95"])
        for a, b in zip(*(document["rows"] for document in sweeps), strict=True)
    ]
    workers = [idle_knob(document["rows"]) for document in sweeps]
    print("\n".join(entry["text"] for entry in workers))
    twins = sweep(
        folder / "slowed.json", "--pipelines=device", f"--batch_sizes={_BATCH.value}", "--num_workers=0,1",
        f"--repeats={_REPEATS.value}", *argv[1:], faults=f"{1 - SLOWED}:wait,{SLOWED}:slow",
    )  # fmt: skip
    found = slow_down(twins["rows"])
    slower_by = WAITS["slow"]
    right = 1 / (1 + slower_by)
    print(f"slowed by {slower_by:.0%}, so {right:.3f}x is right: measured {found}")
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
    print(json.dumps({**figures, **checks, "passed": all(checks.values())}))
    return 0 if all(checks.values()) else 1


def sweep(output: pathlib.Path, *more: str, faults: str = "") -> dict[str, Any]:
    """Runs a sweep of the study and returns its document."""
    script = [str(ROOT / "profiling" / "faulty_sweep.py"), f"--faults={faults}"]
    flags_given = [f"--study={_STUDY.value}", f"--output_json={output}", "--resume", *more]
    subprocess.run([sys.executable, *script, *flags_given], check=True)
    return json.loads(output.read_text())


def overlap(a: list[float] | None, b: list[float] | None) -> bool:
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
    app.run(main)
