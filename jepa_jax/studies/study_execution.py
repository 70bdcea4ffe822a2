"""Executes the runs of a study: one process after the other, each stopped cleanly, with a progress bar on stderr."""

import pathlib
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jepa_jax.base import processes
from jepa_jax.base.console import ProgressBar
from jepa_jax.base.errors import EXIT_DIVERGED, EXIT_INTERRUPTED, EXIT_OK, EXIT_TERMINATED, EXIT_USER_ERROR
from jepa_jax.base.text import duration, percent
from jepa_jax.studies.study import (
    DIVERGED,
    DONE,
    FAILED,
    FINISHED,
    INTERRUPTED,
    KILLED,
    TIMEOUT,
    Row,
    Run,
    Study,
    check,
    finite,
    last_metric,
    load_rows,
    make_row,
    read_json,
    run_command,
    save_rows,
)
from jepa_jax.studies.study_results import write_plot, write_results

EXIT_NONE_FINISHED = 1  # every run has a row, none of them an accuracy
GRACE_SECONDS = 120.0  # for a run that was asked to stop: it ends its step (or its compilation) and writes a checkpoint


def execute(
    study: Study,
    runs: Sequence[Run],
    *,
    timeout: float | None = None,
    resume: bool = True,
    grace: float = GRACE_SECONDS,
    on_tick: Callable[[Run, float], None] = lambda run, epoch: None,
    on_row: Callable[[Row, list[Row]], None] = lambda row, rows: None,
) -> list[Row]:
    """Runs what is not done yet, one process after the other; returns all rows of the directory.

    Args:
      timeout: seconds for one attempt of one run.
      resume: False refuses a directory that holds results.
      grace: seconds a run has to stop by itself before it is killed.
      on_tick: called a few times a second with the epoch that the run has reached.
      on_row: called with each new row and all rows so far.

    A KeyboardInterrupt (or any other exception raised in the callbacks) stops the run cleanly, keeps its row, and
    goes on to the caller.
    """
    check(study, runs, resume)
    study.output_dir.mkdir(parents=True, exist_ok=True)
    refusal = f"--output_dir = {study.output_dir}: another study is running there; wait for it or use another"
    with processes.only_one(study.output_dir / ".lock", refusal):
        rows = load_rows(study)
        save_rows(study, rows.values())  # the header first: a study killed in its first run is recognised
        for run in runs:
            workdir = study.output_dir / run.name
            if rows.get(run.name, {}).get("status") in DONE:
                continue
            processes.stop_left_over(workdir, grace)
            attempts = rows.get(run.name, {}).get("attempts", 0) + 1
            started = time.monotonic()
            outcome: Row = {"status": INTERRUPTED, "reason": "the study was interrupted", "exit_code": None}
            try:
                if _ended_unseen(workdir):
                    outcome = {"status": FINISHED, "reason": "", "exit_code": EXIT_OK}
                else:
                    outcome = _run_process(study, run, timeout, grace, on_tick)
            finally:
                outcome |= {"attempts": attempts, "attempt_seconds": round(time.monotonic() - started, 3)}
                rows[run.name] = make_row(run, outcome, workdir)
                save_rows(study, rows.values())
                (workdir / processes.PROCESS_FILE).unlink(missing_ok=True)
                on_row(rows[run.name], list(rows.values()))
    return list(rows.values())


def _run_process(
    study: Study, run: Run, timeout: float | None, grace: float, on_tick: Callable[[Run, float], None]
) -> Row:
    """One attempt of a run, in its own process."""
    workdir = study.output_dir / run.name
    ended = processes.run(
        run_command(study, run),
        workdir,
        timeout=timeout,
        grace=grace,
        on_tick=lambda: on_tick(run, reached_epoch(workdir)),
    )
    if ended.timed_out:
        reason = f"stopped after {timeout:g} s (--timeout)"
        return {"status": TIMEOUT, "reason": reason, "exit_code": ended.exit_code}
    status, reason = explain_exit(ended.exit_code, ended.message)
    return {"status": status, "reason": reason, "exit_code": ended.exit_code}


def explain_exit(code: int, message: str) -> tuple[str, str]:
    """Exit code of a run, last message of its log -> status, reason."""
    if code == EXIT_OK:
        return FINISHED, ""
    if code == EXIT_DIVERGED:
        return DIVERGED, message or "the loss became NaN or infinite"
    if code in (EXIT_INTERRUPTED, EXIT_TERMINATED):
        return INTERRUPTED, f"interrupted from outside (exit code {code}); the same command goes on"
    if code < 0:
        name = processes.signal_name(code)
        return KILLED, f"killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
    if code == EXIT_USER_ERROR:
        return FAILED, message or "user error (exit code 2), see log.txt"
    return FAILED, f"exit code {code}: {message or 'see log.txt'}"


def _ended_unseen(workdir: pathlib.Path) -> bool:
    """The run came to its end, but the study was killed before it wrote the row."""
    return (workdir / processes.PROCESS_FILE).exists() and read_json(workdir / "summary.json").get("status") == FINISHED


def reached_epoch(workdir: pathlib.Path) -> float:
    return finite(last_metric(workdir, "epoch")) or 0.0


def conduct(
    study: Study, runs: Sequence[Run], *, timeout: float | None, resume: bool
) -> tuple[int, dict[str, Any], str]:
    """Executes a study with a progress bar on stderr: (exit code, conclusion, Markdown table)."""
    check(study, runs, resume)  # before the bar is drawn
    code = EXIT_OK
    try:
        with processes.sigterm_raises(), Progress(runs) as progress:

            def on_row(row: Row, rows: list[Row]) -> None:
                write_results(study, rows)
                progress.row(row, rows)

            execute(study, runs, timeout=timeout, resume=resume, on_tick=progress.tick, on_row=on_row)
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    except processes.Terminated:
        code = EXIT_TERMINATED
    rows = list(load_rows(study).values())
    result, text = write_results(study, rows)
    if rows:
        write_plot(study, rows)
    if code == EXIT_OK and not result["finished"]:
        code = EXIT_NONE_FINISHED
    return code, result | {"results": str(study.output_dir / "results.json"), "exit_code": code}, text


class Progress(ProgressBar):
    """A bar in units of epochs, with the time left and the best so far; a line on stderr for every row."""

    def __init__(self, runs: Sequence[Run]):
        self.epochs = {run.name: run.values["epochs"] for run in runs}
        super().__init__(sum(self.epochs.values()))
        self.done: dict[str, Row] = {}
        self.best = ""
        self.current = ("", 0.0)  # run, when it began

    def tick(self, run: Run, epoch: float) -> None:
        if self.current[0] != run.name:
            self.current = (run.name, time.monotonic())
        # Runs before this one are done, whether now or in an earlier call.
        names = list(self.epochs)
        before = sum(self.epochs[name] for name in names[: names.index(run.name)])
        epoch = min(epoch, self.epochs[run.name])
        left = time_left(
            self.done.values(), sum(self.epochs.values()) - before, epoch, time.monotonic() - self.current[1]
        )
        position = f"epoch {epoch:.1f}/{self.epochs[run.name]}"
        self.show(before + epoch, run.name, position, left and f"{left} left", self.best)

    def row(self, row: Row, rows: list[Row]) -> None:
        self.done[row["name"]] = row
        measured = [r for r in rows if r["status"] == FINISHED and r["probe_accuracy"] is not None]
        if measured:
            best = max(measured, key=lambda r: r["probe_accuracy"])
            self.best = f"best {best['probe_accuracy']:.1f} % ({best['name']})"
        figures = percent(row["probe_accuracy"]) if row["status"] == FINISHED else row["reason"]
        self.line(f"{row['name']}: {row['status']}, {figures}, {duration(row['attempt_seconds'])}")


def time_left(done: Iterable[Row], epochs_left: float, epoch: float, elapsed: float) -> str:
    """Time for the epochs that are left: by the runs of this call, or by the first run while it is under way."""
    rates = [row["attempt_seconds"] / row["epochs"] for row in done if row["status"] == FINISHED]
    rate = statistics.median(rates) if rates else elapsed / epoch if epoch > 0 else None
    return duration(max(0.0, rate * (epochs_left - epoch))) if rate is not None else ""
