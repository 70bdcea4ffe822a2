"""What a person sees while a command runs: lines and progress bars on standard error, then the result."""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, Self

from jepa_jax.base.errors import UserError
from jepa_jax.base.files import disk_reason

NOTE_SECONDS = 0.25  # between two texts beside a progress bar
SPEED_SECONDS = 86400.0  # of progress, from which the time left is estimated: one trial or run may take an hour


class TolerantStream:
    """A text stream for people, of which no write raises: neither a full disk nor a closed terminal may end a run.

    Text that cannot be written is dropped; when writing works again, a warning says so first.
    """

    def __init__(self, stream: Any):
        """Wraps a stream; None, which Python has for a closed standard stream, drops everything."""
        self._stream, self._failure = stream, ""

    def write(self, text: str) -> int:
        note = f"warning: text was dropped here ({self._failure})\n" if self._failure else ""
        if self._attempt(lambda: (self._stream.write(note + text), self._stream.flush())):
            self._failure = ""
        return len(text)

    def flush(self) -> None:
        self._attempt(lambda: self._stream.flush())

    def _attempt(self, act: Callable[[], object]) -> bool:
        if self._stream is None:
            return True
        try:
            act()
        except (OSError, ValueError) as error:  # ValueError: the stream was closed
            self._failure = disk_reason(error)
            return False
        return True

    def isatty(self) -> bool:
        return self._stream is not None and not self._failure and self._stream.isatty()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def tolerant(stream: Any) -> Any:
    """Returns a stream of which no write raises."""
    return stream if isinstance(stream, TolerantStream) else TolerantStream(stream)


@contextlib.contextmanager
def tolerant_standard_error() -> Iterator[None]:
    """Lets nothing raise that is written to standard error inside the block, by whichever library.

    Standard streams that are closed are opened on /dev/null: the next file to be opened would get their numbers, and
    with them what C++ libraries print.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free
    before = sys.stderr
    sys.stderr = wrapped = tolerant(before)
    try:
        yield
    finally:
        wrapped.flush()
        if sys.stderr is wrapped and before is sys.__stderr__ and wrapped._failure:
            drop_output(2)
        sys.stderr = before


def drop_output(descriptor: int) -> None:
    """Leads a standard stream to /dev/null, so that the interpreter does not fail when it flushes it at its end."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, descriptor)
    os.close(null)


def print_result(text: str) -> None:
    """Prints the result of a command on standard output; a reader that does not wait for it is no error."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    try:
        print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)
    except (OSError, ValueError) as error:
        if sys.stdout is sys.__stdout__:
            drop_output(1)
        if not isinstance(error, BrokenPipeError):
            raise UserError(f"standard output: cannot be written ({disk_reason(error)}); free it") from error


class Console:
    """Lines and progress bars on standard error; standard output stays free for the result."""

    def __init__(self, stream: Any = None):
        from rich.console import Console as RichConsole

        self._rich = RichConsole(file=tolerant(stream or sys.stderr), highlight=False)
        self._bar: Any = None
        self._task: Any = None
        self._noted = 0.0

    def line(self, text: str) -> None:
        self._print(text)

    def warn(self, text: str) -> None:
        self._print(f"warning: {text}", "yellow")

    def error(self, text: str) -> None:
        self._print(f"error: {text}", "bold red")

    def _print(self, text: str, style: str = "") -> None:
        # A terminal would wrap lines within words; in a pipe a line stays a line.
        self._rich.print(text, style=style, markup=False, soft_wrap=not self._rich.is_terminal)

    def start(self, what: str, total: int | None, done: int = 0) -> None:
        """Shows a bar on a terminal, of unknown length if `total` is None; elsewhere only `line` speaks."""
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
        from rich.progress import TimeRemainingColumn as TimeLeft
        from rich.table import Column

        self.stop()
        if not self._rich.is_terminal:
            return
        counted = (MofNCompleteColumn(), TextColumn("ETA"), TimeLeft()) if total is not None else (TimeElapsedColumn(),)
        note = TextColumn("{task.fields[note]}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"))
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(bar_width=16), *counted, note,
            console=self._rich, transient=True, expand=True, speed_estimate_period=120, refresh_per_second=4,
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

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Shows for how long something of unknown length has run; says elsewhere that it began."""
        if not self._rich.is_terminal:
            self.line(what)
        self.start(what, None)
        try:
            yield
        finally:
            self.stop()

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
        self._bar = rich.progress.Progress(*columns, console=rich.console.Console(file=tolerant(sys.stderr)), **options)
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

    def start(self, what: str, total: int | None, done: int = 0) -> None:
        """Shows nothing."""
