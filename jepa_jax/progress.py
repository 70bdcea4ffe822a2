"""The progress bar of commands that run other programs: on stderr, with a text beside it and lines above it."""

from typing import Self


class ProgressBar:
    """`with` shows it; on a stream that is no terminal only its lines appear."""

    def __init__(self, total: float):
        import rich.console
        import rich.progress

        columns = ("{task.description}", rich.progress.BarColumn(), "{task.percentage:>3.0f} %", "{task.fields[note]}")
        self._bar = rich.progress.Progress(*columns, console=rich.console.Console(stderr=True), transient=True)
        self._task = self._bar.add_task("starting", total=total, note="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_) -> None:
        self._bar.stop()

    def show(self, done: float, what: str, *notes: str) -> None:
        """So much is done, `what` is under way; empty notes are left out."""
        self._bar.update(self._task, completed=done, description=what, note=" · ".join(filter(None, notes)))

    def line(self, text: str) -> None:
        self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
