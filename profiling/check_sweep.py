"""Checks that a sweep survives failing trials and being killed: 12 trials of a tiny config on the CPU.

  python profiling/check_sweep.py [--output_dir=DIR] [--time_limit=60]

One trial really runs out of memory (a limit of its address space), one aborts, one hangs until its time is up
(profiling/faulty_sweep.py). Half-way the sweep is killed with SIGKILL and then resumed. There must be 9 good rows and 3
with the right reasons, no trial measured twice and none left running. Takes about three minutes. Exit code 1 if
anything failed.
"""

import collections
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

import psutil

from jepa_jax.base.console import Console
from jepa_jax.base.errors import UserError
from jepa_jax.cli.command import Command, Result
from jepa_jax.cli.flags import Arguments, Parser

ROOT = pathlib.Path(__file__).parents[1]
FAULTS = {9: "out_of_memory", 5: "crash", 7: "hang"}  # 9 has the largest batch: no other trial is skipped for it
STATUS = {"out_of_memory": "out_of_memory", "crash": "crashed", "hang": "timed_out"}
REASON = {"out_of_memory": "RESOURCE_EXHAUSTED", "crash": "SIGABRT", "hang": "--time_limit"}


def add_flags(parser: Parser) -> None:
    parser.add_flag("output_dir", "DIR", "folder of the results; by default a temporary one")
    parser.add_flag("time_limit", "SECONDS", "time limit of a trial; a slow machine needs more", 60.0, least=1)


def sweep_command(output: pathlib.Path, time_limit: float) -> list[str]:
    return [
        sys.executable,
        str(ROOT / "profiling" / "faulty_sweep.py"),
        "--faults=" + ",".join(f"{index}:{fault}" for index, fault in FAULTS.items()),
        f"--config={ROOT / 'tests' / 'tiny_config.py'}",
        "--batch_sizes=8,16,32",
        "--grad_accum=1,2",
        "--pipelines=grain,device",
        "--max_batches=16",
        "--repeats=1",
        "--use_dummy_data",
        f"--time_limit={time_limit}",
        f"--output_json={output}",
        "--resume",
    ]


def measured(output: pathlib.Path) -> dict[int, list]:
    """Returns the repeats of each row that has some."""
    try:
        rows = json.loads(output.read_text())["rows"]
    except (OSError, ValueError):
        return {}
    return {index: row["repeats"] for index, row in enumerate(rows) if row["repeats"]}


def kill_half_way(command: list[str], output: pathlib.Path, log: pathlib.Path) -> tuple[dict[int, list], list[int]]:
    """Starts the sweep and kills it in its seventh trial; returns the repeats on disk and its child processes."""
    with open(log, "wb") as stderr:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=stderr)
    while len(measured(output)) < 6:
        if process.poll() is not None:
            raise UserError(f"the sweep ended by itself with code {process.returncode}; see {log}")
        time.sleep(0.2)
    time.sleep(1.5)  # into the next trial
    children = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    return measured(output), children


def check_sweep(arguments: Arguments, console: Console) -> Result:
    folder = pathlib.Path(arguments.output_dir or tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    output = folder / "sweep.json"
    if output.exists():
        raise UserError(f"--output_dir={folder}: holds a sweep already; use another")
    command = sweep_command(output, arguments.time_limit)
    os.environ["JAX_PLATFORMS"] = "cpu"
    before, children = kill_half_way(command, output, folder / "first.txt")
    with open(folder / "second.txt", "wb") as stderr:
        resumed = subprocess.run(command, stdout=subprocess.PIPE, stderr=stderr, text=True)
    rows = json.loads(output.read_text())["rows"]
    said = [(folder / name).read_text() for name in ("first.txt", "second.txt")]
    # One line per repeat: its number, then the combination.
    labels = collections.Counter(line.split(" · ")[1] for text in said for line in text.splitlines() if " · " in line)
    checks = {
        "exit_code_0": resumed.returncode == 0,
        "good_rows": sum(row["status"] == "ok" and row["samples_per_sec"] > 0 for row in rows) == 9,
        "right_reasons": all(
            rows[i]["status"] == STATUS[fault] and REASON[fault] in rows[i]["reason"] for i, fault in FAULTS.items()
        ),
        "killed_half_way": 0 < len(before) < 12,
        "kept_as_measured": all(rows[index]["repeats"] == repeats for index, repeats in before.items()),
        "each_measured_once": len(labels) == 12 and set(labels.values()) == {1},
        "none_left_running": not any(psutil.pid_exists(pid) for pid in children),
        "best_printed": json.loads(resumed.stdout.splitlines()[-1])["best"] is not None,
    }
    lines = [f"trial {index}: {rows[index]['status']}: {rows[index]['reason']}" for index in FAULTS]
    lines.append(f"on disk when killed: {len(before)} of 12; results in {folder}")
    passed = all(checks.values())
    return Result([{**checks, "passed": passed}], "\n".join(lines), 0 if passed else 1)


if __name__ == "__main__":
    sys.exit(Command("profiling/check_sweep.py", __doc__, add_flags, check_sweep, program="python").main())
