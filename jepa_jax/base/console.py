"""What a person sees while a command runs: lines and progress bars on standard error."""

import sys
import time
from collections.abc import Callable
from typing import Any, Self

NOTE_SECONDS = 0.25  # between two texts beside a progress bar
SPEED_SECONDS = 86400.0  # of progress, from which the time left is estimated: one trial or run may take an hour


class Console:
    """Lines and progress bars on standard error; standard output stays free for the result."""

    def __init__(self, stream: Any = None):
        from rich.console import Console as RichConsole

        self._rich = RichConsole(file=stream or sys.stderr, highlight=False)
        self._bar: Any = None
        self._task: Any = None
        self._noted = 0.0

    def line(self, text: str) -> None:
        self._rich.print(text, markup=False, soft_wrap=True)

    def warn(self, text: str) -> None:
        self._rich.print(f"warning: {text}", style="yellow", markup=False, soft_wrap=True)

    def error(self, text: str) -> None:
        self._rich.print(f"error: {text}", style="bold red", markup=False, soft_wrap=True)

    def start(self, what: str, total: int, done: int = 0) -> None:
        """Shows a bar on a terminal; elsewhere only `line` speaks."""
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self.stop()
        if not self._rich.is_terminal:
            return
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"), TextColumn("ETA"), TimeRemainingColumn(),
            console=self._rich, transient=True, speed_estimate_period=120, refresh_per_second=4,
        )  # fmt: skip
        self._bar.start()
        self._task = self._bar.add_task(what, total=total, completed=done, note="")

    def advance(self, amount: int = 1, note: Callable[[], str] | None = None) -> None:
        """So much more is done; `note` is asked for the text beside the bar when it is about to be drawn again."""
        if self._bar is None:
            return
        fields = {}
        if note is not None and time.monotonic() - self._noted > NOTE_SECONDS:
            fields, self._noted = {"note": note()}, time.monotonic()
        self._bar.update(self._task, advance=amount, **fields)

    def stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


class ProgressBar:
    """`with` shows it; on a stream that is no terminal only its lines appear."""

    def __init__(self, total: float):
        import rich.console
        import rich.progress

        bar, left = rich.progress.BarColumn(), rich.progress.TimeRemainingColumn()
        columns = ("{task.description}", bar, "{task.percentage:>3.0f} %", left, "{task.fields[note]}")
        options: dict[str, Any] = {"transient": True, "speed_estimate_period": SPEED_SECONDS}
        self._bar = rich.progress.Progress(*columns, console=rich.console.Console(stderr=True), **options)
        self._task = self._bar.add_task("starting", total=total, note="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def show(self, done: float, what: str, *notes: str) -> None:
        """So much is done, `what` is under way; empty notes are left out."""
        self._bar.update(self._task, completed=done, description=what, note=" · ".join(filter(None, notes)))

    def line(self, text: str) -> None:
        self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)


class QuietConsole(Console):
    """Shows warnings and errors only."""

    def line(self, text: str) -> None:
        """Shows nothing."""

    def start(self, what: str, total: int, done: int = 0) -> None:
        """Shows nothing."""
