"""Measures how long a run takes to its first step: compilation without a cache, and a whole start with one.

  python profiling/bench_start.py [--configs=hjepa_100epoch,image_jepa] [--warm=quickstart] [--starts=3]

Compilations are made in this process, without the cache of compiled programs: tracing and lowering in Python, then XLA.
CPU seconds are those of all threads; on a machine that does nothing else, wall time is what counts. Starts are runs of
`jepa-jax train` in an empty folder, the first with an empty cache, timed from the call until the metrics of the first
step are in metrics.jsonl.

Last line: JSON with `compilations` and `starts` (seconds; the first one is cold).
"""

import os
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Any

from random_images import build_on_random_images

from jepa_jax.base.console import Console
from jepa_jax.cli.command import Command, Result
from jepa_jax.cli.flags import Arguments, Parser

LIMIT = 600.0  # seconds for a start


def add_flags(parser: Parser) -> None:
    parser.add_flag("configs", "LIST", "configs to compile", "hjepa_100epoch,image_jepa")
    parser.add_flag("warm", "NAME", "config to start; empty for none", "quickstart")
    parser.add_flag("starts", "N", "starts, the first with an empty cache", 3, least=1)


def compilation(name: str) -> dict[str, Any]:
    """Returns what the step of a config takes until it can run."""
    import jax

    from jepa_jax.program.config import load_config

    jax.config.update("jax_enable_compilation_cache", False)
    config = load_config(name, {"data.source": "shapes", "data.dir": "", "data.num_workers": 0})
    program, batch = build_on_random_images(config, num_train=50_000)
    step: Any = program.train_step
    wall, cpu = time.perf_counter(), time.process_time()
    lowered = step.trace(program.factory.abstract, batch).lower()
    python = time.perf_counter() - wall, time.process_time() - cpu
    wall, cpu = time.perf_counter(), time.process_time()
    compiled = lowered.compile()
    took = time.perf_counter() - wall, time.process_time() - cpu
    return {
        "config": name, "python_seconds": python[0], "python_cpu_seconds": python[1], "xla_seconds": took[0],
        "xla_cpu_seconds": took[1], "fusions": compiled.as_text().count(" fusion("),
    }  # fmt: skip


def start(name: str, cache: pathlib.Path) -> float:
    """Returns the seconds from the call of `jepa-jax train` to the metrics of its first step."""
    with tempfile.TemporaryDirectory(prefix="bench_start_") as folder:
        metrics = pathlib.Path(folder) / "run" / "metrics.jsonl"
        command = [
            sys.executable, "-m", "jepa_jax", "train", f"--config={name}", f"--workdir={metrics.parent}",
            "--config.log.every_steps=1",
        ]  # fmt: skip
        began = time.perf_counter()
        process = subprocess.Popen(
            command, env={**os.environ, "XDG_CACHE_HOME": str(cache)}, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            while not metrics.exists() or b"train/loss" not in metrics.read_bytes():
                if process.poll() is not None or time.perf_counter() - began > LIMIT:
                    raise RuntimeError(f"{name}: no first step within {LIMIT:.0f} s")
                time.sleep(0.01)
            return time.perf_counter() - began
        finally:
            process.kill()
            process.wait()


def bench(arguments: Arguments, console: Console) -> Result:
    compilations, starts = [], []
    for name in filter(None, arguments.configs.split(",")):
        row = compilation(name)
        compilations.append(row)
        console.line(
            f"{name}: Python {row['python_seconds']:.1f} s, XLA {row['xla_seconds']:.1f} s "
            f"({row['xla_cpu_seconds']:.1f} CPU s), {row['fusions']:,} fusions"
        )
    with tempfile.TemporaryDirectory(prefix="bench_start_cache_") as cache:
        for i in range(arguments.starts if arguments.warm else 0):
            starts.append(start(arguments.warm, pathlib.Path(cache)))
            console.line(f"{arguments.warm}: {starts[-1]:.1f} s to the first step, {'warm' if i else 'cold'}")
    return Result([{"compilations": compilations, "starts": starts}], "")


if __name__ == "__main__":
    sys.exit(Command("profiling/bench_start.py", __doc__, add_flags, bench, program="python").main())
