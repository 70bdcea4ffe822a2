"""Measures how long a checkpoint with checksums stops the training loop.

  python profiling/bench_checkpoint.py [--millions=100] [--saves=5] [--folder=DIR]

The state has that many million float32 numbers in all, in arrays of up to 2.4 million (those of a ViT-B). A jitted step
that donates the state, as training does, runs without a pause; now and then its result is saved while it goes on. The
stall of a save is the duration of the call, plus what the next step takes longer than the median one: it would wait for
buffers that are still being read. Steps that share cores with the thread that writes are slower too; that is told apart
as `slower_steps_percent`. At the end a checkpoint is verified, and read by Orbax alone.
"""

import dataclasses
import pathlib
import statistics
import sys
import tempfile
import time
from typing import Any

from jepa_jax.base.console import Console
from jepa_jax.base.errors import EXIT_OK, EXIT_USER_ERROR
from jepa_jax.cli.command import Command, Result
from jepa_jax.cli.flags import Arguments, Parser

LARGEST = 768 * 3072  # numbers in an array
BAR_MS = 200.0
WARM_UP = 2  # saves that import modules, start threads and get memory from the system


def add_flags(parser: Parser) -> None:
    parser.add_flag("millions", "N", "float32 numbers of the state, in millions", 100, least=1)
    parser.add_flag("saves", "N", "checkpoints to write", 5, least=1)
    parser.add_flag("steps", "N", "steps between them", 20, least=5)
    parser.add_flag("folder", "DIR", "where to write; by default a temporary folder")


def make_state(millions: int) -> Any:
    """Returns a state of random numbers, which do not compress."""
    import jax
    import jax.numpy as jnp

    from jepa_jax.program.step import TrainState

    sizes, left = [], millions * 1_000_000
    while left:
        sizes.append(min(left, LARGEST))
        left -= sizes[-1]
    keys = jax.random.split(jax.random.key(0), len(sizes))
    arrays = {f"array{i:03d}": jax.random.normal(keys[i], size) for i, size in enumerate(sizes)}
    return TrainState(jnp.int32(0), jax.random.key_data(jax.random.key(1)), {"model": arrays}, {}, (), {}, {})


def equals_plain(folder: pathlib.Path, state: Any) -> bool:
    """Returns whether Orbax alone reads the same numbers from a checkpoint."""
    import jax
    import numpy as np
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as plain:
        restored = plain.restore(folder.resolve() / "state")
    arrays = {f"params/model/{name}": array for name, array in state.params["model"].items()}
    return all(np.array_equal(restored[name], jax.device_get(array)) for name, array in arrays.items())


class Training:
    """Steps that donate the state, as those of training do."""

    def __init__(self, millions: int):
        import jax

        def step(state: Any) -> Any:
            halved = jax.tree.map(lambda x: x * 0.999, state.params)
            return dataclasses.replace(state, step=state.step + 1, params=halved)

        self._step = jax.jit(step, donate_argnums=0)
        self.state = self._step(make_state(millions))

    def timed_step(self) -> float:
        """Takes a step; returns its seconds."""
        import jax

        began = time.perf_counter()
        self.state = jax.block_until_ready(self._step(self.state))
        return time.perf_counter() - began


def bench(millions: int, saves: int, steps: int, folder: pathlib.Path) -> dict[str, Any]:
    """Trains and saves; returns the figures."""
    from jepa_jax.program.checkpoint import Checkpoints
    from jepa_jax.program.checksums import verify
    from jepa_jax.program.config import load_config
    from jepa_jax.runtime.allocator import keep_freed_memory
    from jepa_jax.runtime.provenance import code_version

    keep_freed_memory()  # as training does
    training, rows, config = Training(millions), [], load_config("quickstart")
    with Checkpoints(folder, identity={"config": config.to_dict(), "code": code_version(config)}) as checkpoints:
        for number in range(1, saves + WARM_UP + 1):
            usual = statistics.median(training.timed_step() for _ in range(steps))
            began = time.perf_counter()
            checkpoints.save(number, training.state, {"step": number})
            called = time.perf_counter() - began
            stalled, meanwhile = called + max(0.0, training.timed_step() - usual), [usual]
            while checkpoints.is_saving():
                meanwhile.append(training.timed_step())
            checkpoints.wait()
            rows.append((called, stalled, statistics.median(meanwhile) / usual, time.perf_counter() - began, usual))
        last = training.state
        checkpoints.save(saves + WARM_UP + 1, last, {"step": saves + WARM_UP + 1})
    calls, stalls, ratios, seconds, usual_steps = zip(*rows[WARM_UP:], strict=True)
    newest = folder / f"step_{saves + WARM_UP + 1}"
    return {
        "state_numbers": millions * 1_000_000,
        "saves": saves,
        "call_ms_median": 1e3 * statistics.median(calls),
        "stall_ms_median": 1e3 * statistics.median(stalls),
        "stall_ms_max": 1e3 * max(stalls),
        "warm_up_stalls_ms": [round(1e3 * row[1]) for row in rows[:WARM_UP]],
        "step_ms": 1e3 * statistics.median(usual_steps),
        "slower_steps_percent": 100 * (statistics.median(ratios) - 1),
        "save_seconds": statistics.median(seconds),
        "bytes": sum(path.stat().st_size for path in newest.rglob("*") if path.is_file()),
        "verified": verify(newest).whole,
        "restored_with_plain_orbax": equals_plain(newest, last),
    }


def run_bench(arguments: Arguments, console: Console) -> Result:
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(arguments.folder or temporary) / "checkpoints"
        figures = bench(arguments.millions, arguments.saves, arguments.steps, folder)
    held = figures["stall_ms_max"] < BAR_MS and figures["verified"] and figures["restored_with_plain_orbax"]
    texts = {name: f"{value:,.1f}" if isinstance(value, float) else str(value) for name, value in figures.items()}
    lines = [f"{name:<28}{text:>16}" for name, text in texts.items()]
    return Result([{**figures, "bar_ms": BAR_MS, "held": held}], "\n".join(lines), EXIT_OK if held else EXIT_USER_ERROR)


if __name__ == "__main__":
    sys.exit(Command("profiling/bench_checkpoint.py", __doc__, add_flags, run_bench, program="python").main())
