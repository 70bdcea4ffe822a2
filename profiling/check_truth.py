"""Checks the profiler against injected truth: waits, evaluations, pictures and checkpoints of a known length.

    python profiling/check_truth.py [--workers=0,2] [--shares=0.8,0.5,0.2] [--step_seconds=0.2]

Every training step sleeps on the device for --step_seconds. For each number of workers, a loader sleeps so long per
batch that the run should wait for data the given shares of its time; then evaluations, pictures and checkpoints sleep.
What the profiler finds is compared with this script's own clock, because a busy machine sleeps longer than asked for.
The true wait for data is the time that the loop spends asking for a batch while no step runs.
A stall may still fall between the two clocks, so a check that fails is repeated, up to --attempts times: a profiler
that is wrong is wrong every time.

Prints a table; the last line is a JSON object. Exit code 1 if a check failed.
"""

import dataclasses
import functools
import json
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import jax
import numpy as np

from jepa_jax.base.console import Console
from jepa_jax.base.files import write_atomically
from jepa_jax.cli.flags import Parser
from jepa_jax.config.groups import Config
from jepa_jax.data.contract import Source
from jepa_jax.data.sources import Splits, open_data
from jepa_jax.evals.evaluators import Evaluator, Figures, Moment, Stage
from jepa_jax.profiling.bottlenecks import DATA_WAIT
from jepa_jax.program.build import Program, build_program
from jepa_jax.program.checkpoint import Checkpoints
from jepa_jax.program.config import load_config
from jepa_jax.program.step_metrics import StepMetrics
from jepa_jax.training import actions, setup
from jepa_jax.training.run import train
from jepa_jax.training.steps import Steps

STEPS = 4  # per epoch
BATCH_SIZE = 16
TOLERANCE = 3.0  # points of percent
SEVERITY_TOLERANCE = 5.0  # points of percent
GENERATION_TOLERANCE = 10.0  # percent of the time per batch
PAUSES = {"validation_epoch": 0.5, "visualization_generation": 0.3, "checkpoint": 0.2}  # seconds
SMALL = {
    "mesh.data": 1, "model.width": 8, "data.num_train": BATCH_SIZE * STEPS, "data.num_test": 16,
    "data.batch_size": BATCH_SIZE, "data.prefetch": 1, "optim.warmup_epochs": 0.5, "eval.untrained": False,
    "eval.calibration_images": 0, "log.every_steps": 100, "log.tensorboard": False, "log.pictures_every_epochs": 0,
}  # fmt: skip

Span = tuple[float, float]


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A figure of the profiler beside the truth."""

    check: str
    figure: str
    truth: float
    found: float
    tolerance: float

    @property
    def passed(self) -> bool:
        return abs(self.found - self.truth) <= self.tolerance


class Watch(Console):
    """Notes when the profiler has closed each epoch; shows nothing."""

    def __init__(self, on_epoch: Callable[[int], None] = lambda number: None):
        super().__init__(open(os.devnull, "w"))
        self.ends: list[float] = []
        self._on_epoch = on_epoch

    def line(self, text: str) -> None:
        if text.startswith("epoch "):
            self.ends.append(time.perf_counter())
            self._on_epoch(len(self.ends))

    warn = line


class Sleepy:
    """A training split whose batches take as long as a file says, which worker processes read too."""

    def __init__(self, source: Source, path: pathlib.Path):
        self._source, self._path = source, path
        self.classes, self.spec = source.classes, source.spec

    def __len__(self) -> int:
        return len(self._source)

    def batch(self, indices: np.ndarray) -> dict[str, Any]:
        if len(indices) == BATCH_SIZE:  # a batch of training
            time.sleep(float(self._path.read_text()))
        return self._source.batch(indices)


class SleepyEvaluator(Evaluator):
    """Sleeps after every epoch."""

    def __init__(self, spans: list[Span]):
        self._spans = spans

    def due(self, moment: Moment) -> bool:
        return moment.stage == Stage.EPOCH

    def run(self, state: Any, moment: Moment) -> Figures:
        return slowly(lambda: {}, PAUSES["validation_epoch"], self._spans)()


def slowly(function: Callable, seconds: float, spans: list[Span]) -> Callable:
    """Returns the function, sleeping before it runs; appends when it did so to `spans`."""

    def call(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        time.sleep(seconds)
        result = function(*args, **kwargs)
        spans.append((start, time.perf_counter()))
        return result

    return call


def build_slow(step_seconds: float, spans: list[Span], *args: Any, **kwargs: Any) -> Program:
    """Builds a program whose training step only sleeps on the device."""
    program = build_program(*args, **kwargs)
    sleep = slowly(np.float32, step_seconds, spans)

    def train_step(state: Any, batch: Any) -> tuple[Any, StepMetrics]:
        figure = jax.pure_callback(sleep, jax.ShapeDtypeStruct((), np.float32), state.step)
        names = ("loss", "grad_norm", "update_norm", "lr")
        return dataclasses.replace(state, step=state.step + 1), StepMetrics.of(dict.fromkeys(names, figure))

    return dataclasses.replace(program, train_step=jax.jit(train_step, donate_argnums=0))


def run_slow(config: Config, workdir: pathlib.Path, watch: Watch, step_seconds: float) -> list[Span]:
    """Trains with slow steps; returns when they ran."""
    spans: list[Span] = []
    with mock.patch.object(setup, "build_program", functools.partial(build_slow, step_seconds, spans)):
        train(config, workdir, console=watch)
    return spans


def epochs_of(workdir: pathlib.Path) -> dict[int, dict[str, Any]]:
    """Returns the records of profile.json by the number of the epoch."""
    return {epoch["epoch"]: epoch for epoch in json.loads((workdir / "profile.json").read_text())["epochs"]}


def metrics_of(workdir: pathlib.Path) -> dict[int, dict[str, Any]]:
    """Returns the profiler's metrics by the number of the epoch."""
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return {round(row["epoch"]): row for row in rows if "profiling/mfu" in row}


def percent(epoch: dict[str, Any], section: str) -> float:
    return 100 * epoch["sections"][section] / epoch["seconds"]


def waiting_percent(waits: Sequence[Span], steps: Sequence[Span], start: float, end: float) -> float:
    """Returns the time of waits during which no step ran, in percent of the epoch from `start` to `end`."""
    inside = [wait for wait in waits if start < wait[0] < end]
    hidden = sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in inside for b in steps)
    return 100 * (sum(done - begin for begin, done in inside) - hidden) / (end - start)


def check_waits(
    folder: pathlib.Path, workers: int, shares: Sequence[float], step_seconds: float
) -> Iterator[Comparison]:
    """Trains two epochs for each share: in the first, batches that are under way still have the pace of before."""
    loaders = max(workers, 1)
    paces = [loaders * step_seconds / (1 - share) for share in shares for _ in range(2)]
    control = folder / "seconds"

    def set_pace(epoch: int) -> None:
        write_atomically(control, str(paces[min(epoch, len(paces) - 1)]))

    def open_sleepy(data: Any) -> Splits:
        opened = open_data(data)
        return opened._replace(train=Sleepy(opened.train, control))

    set_pace(0)
    watch = Watch(set_pace)
    waits: list[Span] = []
    timed_wait = slowly(Steps.wait_for, 0.0, waits)
    changes = {"optim.epochs": float(len(paces)), "data.num_workers": workers, "train.checkpoint_every_steps": 1000}
    config = load_config("quickstart", SMALL | changes)
    with (
        mock.patch.object(setup, "open_data", open_sleepy),
        mock.patch.object(setup, "build_evaluators", lambda context: {}),
        mock.patch.object(Steps, "wait_for", lambda *args: timed_wait(*args)),
    ):
        steps = run_slow(config, folder / "run", watch, step_seconds)
    epochs, metrics = epochs_of(folder / "run"), metrics_of(folder / "run")
    for index, share in enumerate(shares):
        number = 2 + 2 * index
        name, row = f"{workers} workers, {share:.0%} waiting", metrics[number]
        truth = waiting_percent(waits, steps, watch.ends[number - 2], watch.ends[number - 1])
        yield Comparison(name, "data_wait %", truth, percent(epochs[number], "data_wait"), TOLERANCE)
        pace, generation = paces[number - 1], row["profiling/data_generation_time"]
        yield Comparison(
            name, "data_generation_time ms", 1e3 * pace, 1e3 * generation, 10 * GENERATION_TOLERANCE * pace
        )
        if abs(truth - 100 * DATA_WAIT) > TOLERANCE:
            raised = truth > 100 * DATA_WAIT
            yield Comparison(name, "bottleneck", raised, row["profiling/bottleneck_data_generation"], 0)
            severity = 100 * row["profiling/data_gen_bottleneck_severity"]
            yield Comparison(name, "severity %", truth if raised else 0.0, severity, SEVERITY_TOLERANCE)


def check_pauses(folder: pathlib.Path, step_seconds: float) -> Iterator[Comparison]:
    """Compares the pauses of the second epoch with its length."""
    spans: dict[str, list[Span]] = {section: [] for section in PAUSES}
    section = "visualization_generation"
    slow_grid = slowly(actions.view_grid, PAUSES[section], spans[section])
    slow_save = slowly(Checkpoints.save, PAUSES["checkpoint"], spans["checkpoint"])
    changes = {"optim.epochs": 4.0, "train.checkpoint_every_steps": 0, "log.pictures_every_epochs": 1}
    watch = Watch()
    with (
        mock.patch.object(setup, "build_evaluators", lambda _: {"sleepy": SleepyEvaluator(spans["validation_epoch"])}),
        mock.patch.object(actions.DrawPictures, "_pictures", lambda self, params, stats, batch: batch["image"][None]),
        mock.patch.object(actions, "view_grid", slow_grid),
        mock.patch.object(Checkpoints, "save", lambda *args: slow_save(*args)),
    ):
        steps = run_slow(load_config("quickstart", SMALL | changes), folder / "run", watch, step_seconds)
    start, end, *_ = watch.ends
    wall, epoch = end - start, epochs_of(folder / "run")[2]
    yield Comparison("pauses", "epoch, % of its length", 100, 100 * epoch["seconds"] / wall, 5)
    spans_of = {**spans, "device": [span for span in steps if start < span[0] < end]}
    for section, found in spans_of.items():
        taken = sum(done - begin for begin, done in found if start < begin < end)
        seen = 100 * epoch["device_seconds"] / epoch["seconds"] if section == "device" else percent(epoch, section)
        yield Comparison("pauses", f"{section} %", 100 * taken / wall, seen, TOLERANCE)


def repeated(check: Callable[[pathlib.Path], Iterator[Comparison]], most: int) -> tuple[list[Comparison], int]:
    """Returns the comparisons of the first attempt in which all pass, or else of the last one, and its number."""
    attempt = 0
    while True:
        attempt += 1
        with tempfile.TemporaryDirectory() as folder:
            found = list(check(pathlib.Path(folder)))
        if attempt >= most or all(comparison.passed for comparison in found):
            return found, attempt


def main() -> int:
    parser = Parser("check_truth", __doc__ or "")
    parser.add_flag("workers", "LIST", "numbers of loading processes", "0,2")
    parser.add_flag("shares", "LIST", "of waiting for data, largest first: buffers stay empty", "0.8,0.5,0.2")
    parser.add_flag("step_seconds", "SECONDS", "of each step, long against a machine's delays", 0.2)
    parser.add_flag("attempts", "N", "of each check", 3)
    arguments = parser.parse(sys.argv[1:])
    shares = [float(share) for share in arguments.shares.split(",")]
    checks: list[Callable[[pathlib.Path], Iterator[Comparison]]] = [
        functools.partial(check_waits, workers=int(workers), shares=shares, step_seconds=arguments.step_seconds)
        for workers in arguments.workers.split(",")
    ]
    checks.append(functools.partial(check_pauses, step_seconds=arguments.step_seconds))
    print(f"{'check':<24}{'figure':<28}{'truth':>10}{'found':>10}{'tolerance':>11}")
    rows: list[dict[str, Any]] = []
    for check in checks:
        comparisons, attempt = repeated(check, arguments.attempts)
        for one in comparisons:
            rows.append(dataclasses.asdict(one) | {"attempt": attempt, "passed": one.passed})
            figures = f"{one.truth:>10.1f}{one.found:>10.1f}{one.tolerance:>11.1f}"
            print(f"{one.check:<24}{one.figure:<28}{figures}  {'ok' if one.passed else 'WRONG'}", flush=True)
    passed = all(row["passed"] for row in rows)
    print(json.dumps({"comparisons": rows, "passed": passed}))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
