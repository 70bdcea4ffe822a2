"""Damages files of every format that is read, at random, and checks that each is read or refused by one clear error.

  python profiling/fuzz.py [--minutes=10] [--seed=0] [--only=NAME,...]

A traceback, a crash of the interpreter, more than 10 s of CPU time, or more than 2 GiB of memory for a file of a few
kilobytes is a problem. Each format has a process of its own and an equal share of the time. The table says how many
damaged files of each format were read; the last line is JSON with the same. Exit code 0 only if there is no problem.
`fuzz_cases.check` with the seed of a problem repeats it.
"""

import itertools
import json
import os
import pathlib
import resource
import subprocess
import sys
import tempfile
import time
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))  # for tests.runs

from jepa_jax.base.console import Console
from jepa_jax.base.errors import UserError
from jepa_jax.cli.command import Command, Result
from jepa_jax.cli.flags import Arguments, Parser

MEMORY = 2 << 30  # bytes beyond what a process takes before it reads anything
SHOWN = 5  # problems per format
START_SECONDS = 300.0  # for a process to import everything, on a busy machine


def add_flags(parser: Parser) -> None:
    parser.add_flag("minutes", "M", "in all", 10.0)
    parser.add_flag("seed", "N", "of the first file of each format", 0)
    parser.add_flag("only", "NAMES", "formats to try, with commas; by default all", "")
    parser.add_flag("run", "DIR", "folder of a finished run; one is trained by default", "")


def fuzz(arguments: Arguments, console: Console) -> Result:
    from profiling.fuzz_cases import readers
    from profiling.fuzz_json import json_files

    with tempfile.TemporaryDirectory(prefix="fuzz") as name:
        run = pathlib.Path(arguments.run or name) / ("" if arguments.run else "run")
        if not arguments.run:
            from tests.runs import WHOLE
            from tests.runs import run as train

            console.line("training a tiny run, whose files are damaged")
            train(run, **WHOLE)
        names = [*readers(), *json_files(run)]
        wanted = arguments.only.split(",") if arguments.only else names
        if unknown := set(wanted) - set(names):
            raise UserError(f"--only={arguments.only}: {min(unknown)} is not one of {', '.join(names)}")
        rows: dict[str, dict[str, Any]] = {}
        for target in wanted:
            seconds = 60 * arguments.minutes / len(wanted)
            rows[target] = try_format(target, run, pathlib.Path(name) / "files" / target, seconds, arguments.seed)
            console.line(in_words(target, rows[target]))
    problems = sum(row["problems"] for row in rows.values())
    total = {"cases": sum(row["cases"] for row in rows.values()), "problems": problems, "formats": rows}
    text = "\n".join(in_words(target, row) for target, row in rows.items())
    return Result([total], f"{text}\n{total['cases']:,} cases, {problems} problems", 1 if problems else 0)


def in_words(target: str, row: dict[str, Any]) -> str:
    return "\n  ".join([f"{target:<20} {row['cases']:>7,} cases {row['problems']:>4} problems", *row["shown"]])


def try_format(target: str, run: pathlib.Path, folder: pathlib.Path, seconds: float, seed: int) -> dict[str, Any]:
    """Tries one format for some seconds, in processes of its own: a file that ends one is a problem."""
    cases, problems = 0, []
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        folder.mkdir(parents=True, exist_ok=True)
        log = folder.with_suffix(".log")
        command = [sys.executable, __file__, "--work", target, str(run), f"{folder}_{seed}", str(seed), str(left)]
        with open(log, "w") as output, open(folder.with_suffix(".err"), "w+") as errors:  # image libraries warn a lot
            try:
                code = subprocess.run(command, stdout=output, stderr=errors, timeout=left + START_SECONDS).returncode
            except subprocess.TimeoutExpired:
                code = "not ended in time"
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        cases += len(lines)
        problems += [f"seed {line['seed']}: {line['problem']}" for line in lines if line.get("problem")]
        if code == 0:
            break
        seed = (lines[-1]["seed"] if lines else seed) + 1
        said = folder.with_suffix(".err").read_text().strip().rpartition("\n")[2]
        problems.append(f"seed {seed}: the process ended with {code}: {said[:200]}")
        seed += 1
    return {"cases": cases, "problems": len(problems), "shown": problems[:SHOWN]}


def work(target: str, run: str, folder: str, seed: str, seconds: str) -> None:
    """Tries files of one format; prints a line of JSON for each."""
    from profiling.fuzz_cases import check, readers
    from profiling.fuzz_json import json_files

    lines, sys.stdout = os.fdopen(os.dup(1), "w", buffering=1), sys.stderr  # libraries print remarks
    place = pathlib.Path(folder)
    place.mkdir(parents=True)
    chosen = readers().get(target) or json_files(pathlib.Path(run))[target]
    chosen.write(place)
    chosen.read(place)
    used = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    end = time.monotonic() + float(seconds)
    for number in itertools.count(int(seed)):
        lines.write(json.dumps({"seed": number, "problem": check(chosen, place, number)}) + "\n")
        if time.monotonic() > end:
            break


if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["PYTHONPATH"] = str(pathlib.Path(__file__).parents[1])
    if sys.argv[1:2] == ["--work"]:
        work(*sys.argv[2:])
    else:
        sys.exit(Command("profiling/fuzz.py", __doc__, add_flags, fuzz, program="python").main())
