"""Kills training runs with SIGKILL at random steps, resumes them, and compares the final parameters bit for bit.

  python profiling/check_resume.py [--tries=5] [--pipelines=grain:0,grain:2,device:0]

The run is the quickstart config, shortened. `grain:2` loads batches in two worker processes. The result has `equal` of
`tries` for each pipeline, and the steps at which runs were killed. Exit code 1 if parameters differ.
"""

import argparse
import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import time
from typing import Any

from jepa_jax.base.console import Console
from jepa_jax.cli.command import Command, Result
from jepa_jax.cli.flags import Parser

ROOT = pathlib.Path(__file__).parents[1]
STEPS = 40
TIMEOUT = 600
SHORT = (
    "--config.data.num_train=1024", "--config.data.num_test=64", "--config.data.batch_size=32",
    "--config.optim.epochs=1.25", "--config.optim.warmup_epochs=0.2", "--config.train.checkpoint_every_steps=4",
    "--config.log.every_steps=1", "--config.log.tensorboard=False", "--config.eval.untrained=False",
    "--config.eval.batch_size=64", "--config.eval.every_epochs=0", "--config.eval.max_images=64",
    "--config.model.width=8",
)  # fmt: skip


def add_flags(parser: Parser) -> None:
    parser.add_flag("tries", "N", "runs to kill for each pipeline", 5, least=1)
    parser.add_flag("pipelines", "LIST", "pipeline:workers", "grain:0,grain:2")
    parser.add_flag("seed", "N", "seed of the steps at which runs are killed", 0)


def start(workdir: pathlib.Path, pipeline: str) -> subprocess.Popen[str]:
    """Starts a training process."""
    kind, workers = pipeline.split(":")
    command = [
        sys.executable, "-m", "jepa_jax", "train", "--config=quickstart", f"--workdir={workdir}", *SHORT,
        f"--config.data.pipeline={kind}", f"--config.data.num_workers={workers}",
    ]  # fmt: skip
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> str:
    """Waits for a run and returns the digest of its final parameters."""
    output, errors = process.communicate(timeout=TIMEOUT)
    if process.returncode:
        raise SystemExit(f"a run ended with exit code {process.returncode}:\n{errors}")
    return json.loads(output.splitlines()[-1])["params_sha256"]


def last_step(workdir: pathlib.Path) -> int:
    """Returns the newest step of metrics.jsonl; 0 before there is one."""
    try:
        lines = (workdir / "metrics.jsonl").read_text().splitlines()
    except FileNotFoundError:
        return 0
    for line in reversed(lines):
        try:
            return json.loads(line)["step"]
        except ValueError:
            continue  # half a line: it is being written
    return 0


def kill_at(process: subprocess.Popen[str], workdir: pathlib.Path, step: int) -> int:
    """Kills the run once it has logged `step`; returns the step it was seen at."""
    deadline = time.monotonic() + TIMEOUT
    while last_step(workdir) < step:
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            raise SystemExit(f"the run ended before step {step}:\n{process.communicate()[1]}")
        time.sleep(0.005)
    process.kill()
    process.communicate()
    return last_step(workdir)


def check(arguments: argparse.Namespace, console: Console) -> Result:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    rng = random.Random(arguments.seed)
    result: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        expected = finish(start(root / "whole", "grain:0"))
        for pipeline in arguments.pipelines.split(","):
            killed, equal = [], 0
            for attempt in range(arguments.tries):
                workdir = root / f"{pipeline.replace(':', '_')}_{attempt}"
                process = start(workdir, pipeline)
                killed.append(kill_at(process, workdir, rng.randint(1, STEPS - 2)))
                same = finish(start(workdir, pipeline)) == expected
                equal += same
                console.line(f"{pipeline}: killed at step {killed[-1]}, resumed: {'equal' if same else 'DIFFERENT'}")
            result[pipeline] = {"tries": arguments.tries, "equal": equal, "killed_at": killed}
    good = all(entry["equal"] == entry["tries"] for entry in result.values())
    text = "\n".join(f"{name}: {entry['equal']} of {entry['tries']} equal" for name, entry in result.items())
    return Result([result], text, 0 if good else 1)


if __name__ == "__main__":
    command = Command("profiling/check_resume.py", __doc__, add_flags, check, uses_jax=False, program="python")
    sys.exit(command.main())
