"""The same sweep twice: do its intervals overlap, is a planted slow-down found, is a knob without effect called one?

    python profiling/check_noise.py [--study=profiling/sweeps/cpu.toml] [--output_dir=runs/check_noise]

One trial of the study, the last one, is slower by a tenth on purpose (its steps wait when they are complete). It runs
the same program from the same pipeline as another trial, whose other number of workers nobody asks. Checked: the
intervals of the two sweeps overlap in at least 90 % of rows; in both the slowed trial is found slower than that other
one, by 10 % within the interval (widened by 2 %: a step that waits for itself no longer overlaps with what the host
does); num_workers has no effect by construction with pipeline=device. What was measured is kept: the same command goes
on. The last line is a JSON object; exit code 1 if anything failed.
"""

import json
import math
import pathlib
import subprocess
import sys
import tomllib
from typing import Any

from absl import app, flags

_STUDY = flags.DEFINE_string("study", "profiling/sweeps/cpu.toml", "Whose last two trials differ in num_workers alone.")
_OUTPUT = flags.DEFINE_string("output_dir", "runs/check_noise", "Where results go.")

ROOT = pathlib.Path(__file__).parents[1]
LISTS = ("batch_sizes", "num_workers", "grad_accum", "precisions", "remats", "pipelines")
OVERLAP = 0.9
WIDER = 0.02


def main(argv: list[str]) -> int:
    from jepa_jax.profiling.measurement import SLOWER_BY

    folder = pathlib.Path(_OUTPUT.value)
    folder.mkdir(parents=True, exist_ok=True)
    sweeps = [sweep(folder / f"{name}.json", argv[1:]) for name in ("first", "second")]
    overlaps = [
        overlap(a["samples_per_sec_ci95"], b["samples_per_sec_ci95"])
        for a, b in zip(*(document["rows"] for document in sweeps), strict=True)
    ]
    planted = [slow_down(document["rows"]) for document in sweeps]
    for found in planted:
        print(f"slowed by {SLOWER_BY:.0%}, so {1 / (1 + SLOWER_BY):.3f}x is right: measured {found}")
    workers = [idle_knob(document["rows"]) for document in sweeps]
    print("\n".join(entry["text"] for entry in workers))
    checks = {
        "overlapping": sum(overlaps) / len(overlaps) >= OVERLAP,
        "slow_down_found": all(found.verdict == "slower" for found in planted),
        "slow_down_right": all(found.low - WIDER <= 1 / (1 + SLOWER_BY) <= found.high + WIDER for found in planted),
        "idle_knob_named": all(entry["effect"] == "none by construction" for entry in workers),
    }
    figures = {
        "rows": len(overlaps),
        "rows_overlapping": sum(overlaps),
        "noise_percent": [document["conclusion"]["noise_percent"] for document in sweeps],
        "slow_down": [found.as_dict() for found in planted],
    }
    print(json.dumps({**figures, **checks, "passed": all(checks.values())}))
    return 0 if all(checks.values()) else 1


def sweep(output: pathlib.Path, more: list[str]) -> dict[str, Any]:
    """The document of one sweep of the study, its last trial slowed."""
    study = tomllib.loads(pathlib.Path(_STUDY.value).read_text())
    count = math.prod(len(study[name]) for name in LISTS if name in study)
    command = [
        sys.executable,
        str(ROOT / "scripts" / "profile_throughput.py"),
        f"--study={_STUDY.value}",
        f"--inject_faults={count - 1}:slow",  # trials are numbered from 0
        f"--output_json={output}",
        "--resume",
        *more,
    ]
    subprocess.run(command, check=True)
    return json.loads(output.read_text())


def overlap(a: list[float] | None, b: list[float] | None) -> bool:
    return a is not None and b is not None and a[0] <= b[1] and b[0] <= a[1]


def device_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if row["combination"]["pipeline"] == "device"]


def slow_down(rows: list[dict[str, Any]]):
    """The slowed trial against the one that differs from it in the number of workers alone."""
    from jepa_jax.profiling.choice import compare, fit

    slow = rows[-1]
    others = {**slow["combination"], "num_workers": None}
    twin = next(
        row for row in device_rows(rows) if row is not slow and {**row["combination"], "num_workers": None} == others
    )
    return compare(slow, twin, fit(rows))


def idle_knob(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What is said of num_workers where nothing is loaded, without the trial that was slowed and its twin."""
    from jepa_jax.profiling.choice import fit, knob_effects

    slow = rows[-1]["combination"]
    kept = [row for row in device_rows(rows) if row["combination"]["batch_size"] != slow["batch_size"]]
    return next(entry for entry in knob_effects(kept, fit(rows)) if entry["knob"] == "num_workers")


if __name__ == "__main__":
    app.run(main)
