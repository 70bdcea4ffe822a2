"""Measures what the profiler costs: the same training with and without it, in turns, in one process.

  python profiling/bench_overhead.py [--pairs=12] [--cases=quickstart,small]

Two sessions of one run, one of them profiled, train with the same compiled step and take turns: a quarter of an epoch
of one, a quarter of an epoch of the other, in alternating order. The profiled session does everything that profiling a
run takes: the clock of the device, the monitor, recordings of two steps, the account of each epoch and the files that
it writes. The small case has steps of a few milliseconds, where the costs per step weigh most. The overhead is the mean
over pairs of epochs of CPU time (all threads of the process) with its 95 % interval; wall time is printed too.
"""

import contextlib
import dataclasses
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jepa_jax.base.console import Console
from jepa_jax.base.errors import UserError
from jepa_jax.cli.command import Command, Result
from jepa_jax.cli.flags import Arguments, Parser

if TYPE_CHECKING:
    from jepa_jax.profiling.compilations import CompiledStep
    from jepa_jax.training.setup import Run

PARTS = 4  # of an epoch, that take turns
CASES: dict[str, dict[str, Any]] = {
    "quickstart": {},
    "small": {
        "model": {"name": "patchnet", "patch_size": 4, "stride": 2, "stem_width": 32, "widths": (64, 128)},
        "method.views": 2,
        "data.batch_size": 32,
        "data.num_train": 32 * 128,
    },
}
CLOCKS = ("wall", "cpu")

Seconds = dict[str, tuple[float, float]]  # wall and CPU seconds, by arm


def add_flags(parser: Parser) -> None:
    parser.add_flag("pairs", "N", "pairs of epochs", 12, least=2)
    parser.add_flag("cases", "LIST", "cases to run", ",".join(CASES))


class StopWatch:
    """A clock that stands still while it is not this session's turn."""

    def __init__(self) -> None:
        self._elapsed = 0.0
        self._since: float | None = None

    def __call__(self) -> float:
        return self._elapsed + (0.0 if self._since is None else time.perf_counter() - self._since)

    def run(self) -> None:
        self._since = time.perf_counter()

    def stop(self) -> None:
        self._elapsed, self._since = self(), None


class Arm:
    """A run that trains a part of an epoch at a time."""

    def __init__(self, run: "Run", compiled: "CompiledStep", stack: contextlib.ExitStack):
        from jepa_jax.profiling.profiler import Profiler
        from jepa_jax.training.actions import Actions, CloseEpoch, Record
        from jepa_jax.training.progress import Loop, Progress
        from jepa_jax.training.recorder import Recorder
        from jepa_jax.training.saver import Saver
        from jepa_jax.training.signals import StopSignals
        from jepa_jax.training.steps import Steps

        self._watch, self._part = StopWatch(), run.length.steps_per_epoch // PARTS
        self._signals = stack.enter_context(StopSignals(run.program.mesh))
        self._recorder = recorder = stack.enter_context(Recorder(run, compiled, clock=self._watch))
        self._saver = stack.enter_context(Saver(run, recorder))
        self._loop = Loop(0, run.initial_state(), Progress())
        recorder.open(self._loop)
        self._steps = Steps(compiled, recorder.timeline, recorder.profiler.dispatched)
        self._actions = Actions(Record(run, recorder, self._saver), CloseEpoch(run, recorder, self._saver))
        self._batches = stack.enter_context(run.batches(0))
        self._started = False
        self.profiler = recorder.profiler if isinstance(recorder.profiler, Profiler) else None
        if self.profiler:
            self.profiler.monitor.stop()

    def part_of_epoch(self) -> tuple[float, float]:
        """Returns wall and CPU seconds of a part of an epoch, with everything that the loop does around its steps."""
        wall, cpu = time.perf_counter(), time.process_time()
        self._watch.run()
        if self.profiler:
            self.profiler.monitor.start()
        self._train()
        if self.profiler:
            self.profiler.monitor.stop()
        self._watch.stop()
        return time.perf_counter() - wall, time.process_time() - cpu

    def _train(self) -> None:
        from jepa_jax.training.loop import read_metrics

        loop, steps, recorder, signals = self._loop, self._steps, self._recorder, self._signals
        if not self._started:
            recorder.show_training(loop)
            recorder.profiler.start_loop()
            self._started = True
        end = loop.step + self._part
        while loop.step < end:  # as in `training.loop.train_steps`
            recorder.begin_step(loop)
            delivery = steps.wait_for(self._batches, signals.check)
            recorder.before_step(loop, delivery)
            steps.dispatch(loop, delivery)
            signals.vote()
            due = self._actions.due(loop.step)
            # The last step is waited for: none runs on into the turn of the other arm.
            lag = 0 if due or loop.step == end else 1
            read_metrics(steps, recorder, self._saver, lag=lag)
            signals.count_votes(lag=lag)
            recorder.profiler.step_done(loop.step)
            for action in due:
                action.run(loop)
            signals.check()


def epoch_in_turns(arms: dict[str, Arm], first: int) -> Seconds:
    """Returns the time of an epoch of each arm; parts of epochs take turns, so that a slow moment meets both."""
    spent = {name: (0.0, 0.0) for name in arms}
    for part in range(PARTS):
        for name in list(arms)[:: 1 if (part + first) % 2 == 0 else -1]:
            wall, cpu = arms[name].part_of_epoch()
            spent[name] = spent[name][0] + wall, spent[name][1] + cpu
    return spent


def interval(values: Sequence[float]) -> dict[str, float]:
    """Returns the mean and its 95 % t interval."""
    from jepa_jax.base.statistics import student_quantile

    mean = statistics.fmean(values)
    half = student_quantile(len(values) - 1) * statistics.stdev(values) / len(values) ** 0.5
    return {"mean": mean, "low": mean - half, "high": mean + half}


def train_in_turns(case: str, pairs: int, console: Console) -> tuple[list[Seconds], int, dict[str, Any]]:
    """Returns the time of each pair of epochs, the steps of an epoch, and the content of profile.json."""
    from jepa_jax.base.console import QuietConsole
    from jepa_jax.profiling.compilations import CompiledStep
    from jepa_jax.program.config import changed_config, load_config
    from jepa_jax.program.workdir import Workdir
    from jepa_jax.training.setup import NO_HOOKS, prepare

    config = load_config("quickstart", {**CASES[case], "optim.epochs": float(pairs + 2)})
    rounds, arms = [], {}
    with contextlib.ExitStack() as stack:
        folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench_overhead_")))
        run = prepare(config, Workdir(folder), QuietConsole(), NO_HOOKS)
        compiled = CompiledStep(run.program.train_step)  # one program for both
        for name in ("on", "off"):
            own = changed_config(config, {"profile.enabled": name == "on"})
            workdir = Workdir(folder / name)
            workdir.create()
            quiet = Console(stack.enter_context(open(workdir.path / "console.txt", "w")))
            arms[name] = Arm(dataclasses.replace(run, config=own, folder=workdir, console=quiet), compiled, stack)
        for _ in range(PARTS):
            arms["off"].part_of_epoch()  # compiles, and fills caches; not counted
        for i in range(pairs):
            rounds.append(epoch_in_turns(arms, i))
            times = (f"{name} {wall:.3f} s, {cpu:.3f} CPU s" for name, (wall, cpu) in rounds[-1].items())
            console.line(f"{case} pair {i + 1}: " + "  ".join(times))
        assert arms["on"].profiler
        return rounds, run.length.steps_per_epoch, arms["on"].profiler.summary()


def bench_case(case: str, pairs: int, console: Console) -> dict[str, Any]:
    """Returns the overhead of the profiler in one of CASES."""
    rounds, steps, profile = train_in_turns(case, pairs, console)
    result: dict[str, Any] = {
        f"{clock}_overhead_percent": interval([100 * (r["on"][k] / r["off"][k] - 1) for r in rounds])
        for k, clock in enumerate(CLOCKS)
    }
    for k, clock in enumerate(CLOCKS):  # all epochs together: a recording counts as often as there was one
        together = sum(r["on"][k] for r in rounds) / sum(r["off"][k] for r in rounds)
        result[f"{clock}_overhead_percent_together"] = 100 * (together - 1)
    return result | {
        "pairs": pairs,
        "steps_per_epoch": steps,
        "step_milliseconds": 1e3 * statistics.median(r["off"][0] for r in rounds) / steps,
        "recordings": sum(epoch["traced"] for epoch in profile["epochs"]),
        "profiler_seconds": profile["profiler_seconds"],
        "rounds": rounds,
    }


def case_lines(case: str, result: dict[str, Any]) -> list[str]:
    """Returns the overhead of a case in words, by CPU and by wall time."""
    lines = []
    for clock in ("cpu", "wall"):
        figures = result[f"{clock}_overhead_percent"]
        lines.append(
            f"{case}: {result['step_milliseconds']:.1f} ms per step; {clock} overhead {figures['mean']:+.2f} % "
            f"({figures['low']:+.2f} .. {figures['high']:+.2f}), of all epochs together "
            f"{result[f'{clock}_overhead_percent_together']:+.2f} %"
        )
    return lines


def bench(arguments: Arguments, console: Console) -> Result:
    from jepa_jax.runtime.provenance import environment

    cases = arguments.cases.split(",")
    if unknown := [case for case in cases if case not in CASES]:
        raise UserError(f"--cases={arguments.cases}: {unknown[0]} is not one of {', '.join(CASES)}")
    results = {case: bench_case(case, arguments.pairs, console) for case in cases}
    machine = environment()
    text = "\n".join(line for case in cases for line in case_lines(case, results[case]))
    return Result([results | {key: machine[key] for key in ("devices", "processor", "cores", "jax")}], text)


if __name__ == "__main__":
    sys.exit(Command("profiling/bench_overhead.py", __doc__, add_flags, bench, program="python").main())
