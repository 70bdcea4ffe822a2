"""Runs the tasks of an experiment one after the other, each in its own process.

Studies, sweeps and searches share this engine. It keeps their results in one JSON document, holds a lock, stops
processes that a killed predecessor left behind, shows progress with the time left, and turns Ctrl-C and SIGTERM into
an exit code. Its user decides which task is next, explains how a task ended, and saves the document after each one.
"""

import dataclasses
import json
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from jepa_jax.base import processes
from jepa_jax.base.console import ProgressBar
from jepa_jax.base.errors import EXIT_INTERRUPTED, EXIT_OK, UserError
from jepa_jax.base.files import disk_error, write_json
from jepa_jax.base.signals import signals_raise
from jepa_jax.base.text import duration

EXIT_NO_RESULT = 1  # every task has ended, none of them with a result

Header = Mapping[str, Any]
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Task:
    """A command to run in its own process."""

    name: str  # of its folder, which holds its log
    command: Sequence[str]
    label: str  # beside the progress bar
    timeout: float | None = None  # seconds
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)  # in addition to that of this process
    reached: Callable[[], float] = lambda: 0.0  # work done so far, in the unit of the progress bar


class Progress(ProgressBar):
    """Shows the work done, the time left and the best result so far; prints one line per finished task."""

    def __init__(self, total: float, unit: str, paces: Iterable[float] = ()):
        """`paces`: seconds per unit that earlier tasks took."""
        super().__init__(total)
        self.total, self.unit = total, unit
        self.done, self.best = 0.0, ""
        self._paces = list(paces)

    def tick(self, task: Task, elapsed: float) -> None:
        """Updates the bar while a task runs; `elapsed`: seconds since it started."""
        reached = task.reached()
        position = f"{self.done + reached:.3g} of {self.total:g} {self.unit}"
        self.show(self.done + reached, task.label, position, self.time_left(reached, elapsed), self.best)

    def report(self, label: str, status: str, detail: str, *, pace: float | None = None) -> None:
        """Prints the line of a finished task; `pace`: seconds per unit that it took."""
        self._paces += [] if pace is None else [pace]
        left = "" if sys.stderr.isatty() else self.time_left()  # the bar shows it on a terminal
        self.line(" · ".join(filter(None, [f"{self.done:g}/{self.total:g}", label, status, detail, left])))

    def time_left(self, reached: float = 0.0, elapsed: float = 0.0) -> str:
        """Estimates from the median pace of finished tasks, or else from the task under way; empty if unknown."""
        if not self._paces and not reached:
            return ""
        pace = statistics.median(self._paces) if self._paces else elapsed / reached
        return f"{duration(max(0.0, pace * (self.total - self.done - reached)))} left"


class Runner:
    """Runs tasks in subfolders of one folder."""

    def __init__(
        self,
        folder: pathlib.Path,
        *,
        grace: float,
        progress: Progress | None = None,
        on_tick: Callable[[], None] = lambda: None,
    ):
        """`grace`: seconds that a task has to stop by itself before it is killed; `on_tick`: may raise to stop it."""
        self.folder, self.grace, self.progress, self._on_tick = folder, grace, progress, on_tick

    def run(self, task: Task) -> processes.Ended:
        """Runs a task to its end; an exception, such as Ctrl-C, stops it cleanly and is raised again."""
        folder, began = self.folder / task.name, time.monotonic()

        def tick() -> None:
            self._on_tick()
            if self.progress:
                self.progress.tick(task, time.monotonic() - began)

        try:
            return processes.run(
                task.command,
                folder,
                environment=task.environment,
                timeout=task.timeout,
                grace=self.grace,
                on_tick=tick,
            )
        finally:
            (folder / processes.PROCESS_FILE).unlink(missing_ok=True)


@dataclasses.dataclass(frozen=True)
class Experiment:
    """Where an experiment keeps its results, and how messages refer to it."""

    kind: str  # study, sweep or search
    flag: str  # that names `place` on the command line
    place: pathlib.Path
    results: pathlib.Path  # JSON document; its "header" says what was asked for
    folder: pathlib.Path  # of the lock and of one folder per task

    def load(
        self,
        header: Header,
        parse: Callable[[dict[str, Any]], T],
        *,
        resume: bool,
        differences: Callable[[Header, Header], list[str]],
    ) -> T | None:
        """Returns the parsed document of an earlier call, or None if there is none.

        Raises:
          UserError: there is one and `resume` is False, or it belongs to another experiment.
        """
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

    def execute(self, work: Callable[[Runner], None], progress: Progress, *, grace: float) -> int:
        """Calls `work` while holding the lock and returns an exit code; Ctrl-C and SIGTERM end it early."""
        refusal = f"{self.flag} = {self.place}: another {self.kind} is running there; wait for it or use another place"
        try:
            for folder in (self.folder, self.results.parent):
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise disk_error(error, error.filename or self.folder) from error
        try:
            with signals_raise(), processes.only_one(self.folder / ".lock", refusal), progress:
                for left_over in self.folder.glob(f"*/{processes.PROCESS_FILE}"):
                    processes.stop_left_over(left_over.parent, grace)
                work(Runner(self.folder, grace=grace, progress=progress))
        except KeyboardInterrupt as stop:
            return getattr(stop, "exit_code", EXIT_INTERRUPTED)
        return EXIT_OK


def differing_entries(there: Header, here: Header) -> list[str]:
    """Names the entries of two headers that differ."""
    keys = [key for key in {**there, **here} if there.get(key) != here.get(key)]
    return [f"{key}: {there.get(key)} -> {here.get(key)}" for key in keys]
