"""Runs the trials and training runs of sweeps, searches and studies, each in a process of its own.

An `Experiment` keeps the results in one JSON document, holds a lock, stops processes that a killed predecessor left
behind, and turns Ctrl-C and SIGTERM into an exit code. `run_on_cards` runs one job per GPU at a time, `explain_exit`
says how a process ended. The sweep, search or study decides what is next.
"""

import concurrent.futures
import dataclasses
import json
import pathlib
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from jepa_jax.base import processes
from jepa_jax.base.console import ProgressBar
from jepa_jax.base.errors import (
    EXIT_DIVERGED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_TERMINATED,
    EXIT_USER_ERROR,
    UserError,
)
from jepa_jax.base.files import make_folder, write_json
from jepa_jax.base.signals import signals_raise
from jepa_jax.base.text import shortened
from jepa_jax.experiments.rows import DIVERGED, FAILED, FINISHED, INTERRUPTED, OUT_OF_MEMORY, TIMED_OUT
from jepa_jax.runtime.memory import is_out_of_memory

EXIT_NO_RESULT = 1  # every task has ended, none of them with a result
LAST_LINES = 20  # of a log, which may tell why a process ended

Document = dict[str, Any]  # "header", "rows", "conclusion", see docs/reference/sweep.schema.json; "trials" of a search
Header = Mapping[str, Any]
Differences = Callable[[Header, Header], list[str]]  # of two headers, in words
Parsed = TypeVar("Parsed")
AnyJob = TypeVar("AnyJob")
Outcome = TypeVar("Outcome")
Place = TypeVar("Place", int, int | None)


def explain_exit(ended: processes.Ended, timeout: float | None = None, flag: str = "") -> tuple[str, str]:
    """Returns how a process ended, and the reason in words.

    The first is FINISHED, DIVERGED, INTERRUPTED, TIMED_OUT, OUT_OF_MEMORY or FAILED.

    A process that runs out of memory may be told so by XLA, die in an allocation, or be killed by the kernel: its log
    and its exit code together say which. `flag` sets the timeout; the reason names it.
    """
    code, message = ended.exit_code, ended.message
    how = f"killed by {processes.signal_name(code)}" if code < 0 else f"exit code {code}"
    last = f"its last message: {message}" if message else "its log is empty"
    if ended.timed_out:
        advice = f" ({flag}: raise it for a slow machine)" if flag else ""
        return TIMED_OUT, f"stopped after {timeout:g} s{advice}; {last}"
    if code == EXIT_OK:
        return FINISHED, ""
    if code == EXIT_DIVERGED:
        return DIVERGED, message or "the loss became NaN or infinite"
    if code in (EXIT_INTERRUPTED, EXIT_TERMINATED):
        return INTERRUPTED, f"interrupted from outside ({how}); the same command continues it"
    told = [line for line in ended.lines[-LAST_LINES:] if is_out_of_memory(line)]
    if told:
        return OUT_OF_MEMORY, f"{shortened(told[-1])} ({how})"
    if how == "killed by SIGKILL":
        return OUT_OF_MEMORY, f"{how}: as the kernel does when the machine's memory is used up"
    return FAILED, message if code == EXIT_USER_ERROR and message else f"{how}; {last}"


class TaskProgress(ProgressBar):
    """Shows the work done, the time left and the best result so far; prints one line per finished task."""

    def __init__(self, total: float, unit: str):
        super().__init__(total)
        self.total, self.unit = total, unit
        self.done, self.best = 0.0, ""

    def tick(self, label: str, reached: float = 0.0) -> None:
        done = self.done + reached
        self.show(done, label, f"{done:.3g} of {self.total:g} {self.unit}", self.best)

    def report(self, label: str, status: str, detail: str) -> None:
        self.line(f"{self.done:g}/{self.total:g} · {label} · {status} · {detail}")


class Stopped(Exception):
    """Raised in a job's thread when `run_on_cards` is to end."""


def run_on_cards(
    cards: Sequence[Place],
    take: Callable[[Place], AnyJob | None],
    run: Callable[[AnyJob, Place, Callable[[], None]], Outcome],
    keep: Callable[[AnyJob, Outcome], None],
    tick: Callable[[], None] = lambda: None,
) -> None:
    """Runs one job per card at a time until there are no more.

    Jobs run in threads, everything else in the caller's. An exception, of a job or a signal, stops the other jobs
    before it is raised.

    Args:
      take: returns the next job for a card, or None if there is none at the moment; asked again after each job.
      run: runs a job on a card; it calls its last argument now and then, which raises Stopped when it is to end.
      keep: takes what a job has returned.
      tick: called about twice per second.
    """
    stop = threading.Event()

    def check() -> None:
        if stop.is_set():
            raise Stopped

    with concurrent.futures.ThreadPoolExecutor(len(cards)) as pool:
        running: dict[concurrent.futures.Future[Outcome], tuple[Place, AnyJob]] = {}
        try:
            while True:
                busy = [card for card, _ in running.values()]
                for card in cards:
                    if card not in busy and (job := take(card)) is not None:
                        running[pool.submit(run, job, card, check)] = card, job
                if not running:
                    return
                ended, _ = concurrent.futures.wait(running, processes.TICK_SECONDS, concurrent.futures.FIRST_COMPLETED)
                for future in ended:
                    keep(running.pop(future)[1], future.result())
                if not ended:
                    tick()
        finally:
            stop.set()  # the pool waits for what is under way


@dataclasses.dataclass(frozen=True)
class Experiment:
    """Where an experiment keeps its results, and how messages refer to it."""

    kind: str  # study, sweep or search
    flag: str  # that names `place` on the command line
    place: pathlib.Path
    results: pathlib.Path  # JSON document; its "header" says what was asked for
    folder: pathlib.Path  # of the lock and of one folder per task

    def load(
        self, header: Header, parse: Callable[[dict[str, Any]], Parsed], differences: Differences, *, resume: bool
    ) -> Parsed | None:
        """Returns the parsed document of an earlier call, or None if there is none."""
        where, another = f"{self.flag} = {self.place}", f"choose another {self.flag}"
        if not self.results.exists():
            return None
        if not resume:
            raise UserError(f"{where}: holds a {self.kind} already; continue it with --resume, or {another}")
        try:
            document = json.loads(self.results.read_text())
            differing = differences(document["header"], header)
            parsed = parse(document)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            raise UserError(f"{self.results}: does not hold the results of a {self.kind}; {another}") from None
        if differing:
            raise UserError(
                f"{where}: holds a {self.kind} with other settings ({'; '.join(differing)}); "
                f"continue it with the same ones, or {another}"
            )
        return parsed

    def save(self, document: Mapping[str, Any]) -> None:
        write_json(self.results, document)

    def execute(self, work: Callable[[], None], progress: TaskProgress, *, grace: float) -> int:
        """Calls `work` while holding the lock and returns an exit code; Ctrl-C and SIGTERM end it early."""
        refusal = f"{self.flag} = {self.place}: another {self.kind} is running there; wait for it or use another place"
        for folder in (self.folder, self.results.parent):
            make_folder(folder)
        try:
            with signals_raise(), processes.only_one(self.folder / ".lock", refusal), progress:
                processes.stop_all(processes.members(self.folder, below=True), grace)
                work()
        except KeyboardInterrupt as stop:
            return getattr(stop, "exit_code", EXIT_INTERRUPTED)
        return EXIT_OK
