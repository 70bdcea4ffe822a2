"""Measures what the training loop itself costs per step: batches, dispatch, metrics, sinks, signals, profiler.

  python profiling/bench_loop.py [--rounds=8] [--profile=F]

Steps of a few milliseconds run in turns: bare (the compiled step on one batch, awaited a step later), in the
loop without the profiler, and in the loop with it. The cost of the loop is the CPU time of its own thread beyond that
of the bare steps; the step itself runs in other threads. `--profile` also writes a profile of the calls (cProfile).

Last line: JSON with `bare_us`, `loop_us`, `profiled_us` (medians over rounds, microseconds of the loop's thread per
step), `overhead_us` and `profiled_overhead_us`.
"""

import contextlib
import cProfile
import dataclasses
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from bench_overhead import Arm

from jepa_jax.base.console import Console
from jepa_jax.cli.command import Command, Result
from jepa_jax.cli.flags import Arguments, Parser

STEPS = 64  # in a turn
SMALL = {
    "model": {"name": "patchnet", "patch_size": 4, "stride": 4, "stem_width": 16, "widths": (32, 32)},
    "method.views": 2,
    "data.batch_size": 16,
    "data.num_train": 16 * STEPS * 4,
}


def add_flags(parser: Parser) -> None:
    parser.add_flag("rounds", "N", "rounds of turns", 8, least=2)
    parser.add_flag("profile", "F", "file for a profile of the calls, to be read with pstats", "")


def bare_turn(step: Callable[..., Any], state: Any, batch: Any) -> Callable[[], None]:
    """Returns a function that takes STEPS steps and waits for each of them one step later."""
    import jax

    def turn() -> None:
        nonlocal state
        before = None
        for _ in range(STEPS):
            state, metrics = step(state, batch)
            jax.block_until_ready(before)
            before = metrics
        jax.block_until_ready(before)

    return turn


def microseconds(turn: Callable[[], Any]) -> tuple[float, float]:
    """Returns CPU time of this thread, and wall time, per step."""
    cpu, wall = time.thread_time(), time.perf_counter()
    turn()
    return (time.thread_time() - cpu) / STEPS * 1e6, (time.perf_counter() - wall) / STEPS * 1e6


def bench(arguments: Arguments, console: Console) -> Result:
    from jepa_jax.base.console import QuietConsole
    from jepa_jax.profiling.compilations import CompiledStep
    from jepa_jax.program.config import changed_config, load_config
    from jepa_jax.program.workdir import Workdir
    from jepa_jax.training.setup import NO_HOOKS, prepare

    config = load_config("quickstart", {**SMALL, "optim.epochs": float(arguments.rounds + 2)})
    with contextlib.ExitStack() as stack:
        folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench_loop_")))
        run = prepare(config, Workdir(folder), QuietConsole(), NO_HOOKS)
        compiled = CompiledStep(run.program.train_step)
        turns: dict[str, Callable[[], Any]] = {}
        for name in ("loop", "profiled"):
            own = changed_config(config, {"profile.enabled": name == "profiled"})
            workdir = Workdir(folder / name)
            workdir.create()
            quiet = Console(stack.enter_context(open(workdir.path / "console.txt", "w")))
            arm = Arm(dataclasses.replace(run, config=own, folder=workdir, console=quiet), compiled, stack)
            turns[name] = arm.part_of_epoch
            arm.part_of_epoch()  # compiles
        with run.batches(0) as batches:
            batch = next(batches)[0]
        turns["bare"] = bare_turn(compiled, run.initial_state(), batch)
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in turns}
        for i in range(arguments.rounds):
            for name in list(turns)[:: 1 if i % 2 else -1]:
                times[name].append(microseconds(turns[name]))
        if arguments.profile:
            calls = cProfile.Profile(time.thread_time)
            calls.runcall(turns["profiled"])
            calls.dump_stats(arguments.profile)
    own_time = {name: statistics.median(cpu for cpu, _ in each) for name, each in times.items()}
    result = {
        **{f"{name}_us": value for name, value in own_time.items()},
        "overhead_us": own_time["loop"] - own_time["bare"],
        "profiled_overhead_us": own_time["profiled"] - own_time["bare"],
        "step_milliseconds": statistics.median(wall for _, wall in times["bare"]) / 1e3,
        "rounds": times,
    }
    return Result([result], "\n".join(f"{name}: {value:.0f} us per step" for name, value in own_time.items()))


if __name__ == "__main__":
    sys.exit(Command("profiling/bench_loop.py", __doc__, add_flags, bench, program="python").main())
