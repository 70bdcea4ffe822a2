"""Executes the runs of a study: one process after the other, each stopped cleanly, with a progress bar on stderr."""

import contextlib
import math
import os
import pathlib
import signal
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from jepa_jax import html
from jepa_jax.errors import EXIT_DIVERGED, EXIT_INTERRUPTED, EXIT_OK, EXIT_TERMINATED, EXIT_USER_ERROR, UserError
from jepa_jax.files import write_json
from jepa_jax.study import (
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
from jepa_jax.study_results import write_plot, write_results

if TYPE_CHECKING:
    import psutil

EXIT_NONE_FINISHED = 1  # every run has a row, none of them an accuracy
GRACE_SECONDS = 120.0  # for a run that was asked to stop: it ends its step (or its compilation) and writes a checkpoint
POLL_SECONDS = 0.05


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
    with _only_one_study(study.output_dir):
        rows = load_rows(study)
        save_rows(study, rows.values())  # the header first: a study killed in its first run is recognised
        for run in runs:
            workdir = study.output_dir / run.name
            if rows.get(run.name, {}).get("status") in DONE:
                continue
            _stop_left_over(workdir, grace)
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
                (workdir / "process.json").unlink(missing_ok=True)
                on_row(rows[run.name], list(rows.values()))
    return list(rows.values())


def _run_process(
    study: Study, run: Run, timeout: float | None, grace: float, on_tick: Callable[[Run, float], None]
) -> Row:
    """One attempt: starts the process in its own group, waits, and leaves nothing of the group behind."""
    workdir = study.output_dir / run.name
    workdir.mkdir(exist_ok=True)
    log = workdir / "log.txt"
    with open(log, "ab") as output:
        begin = output.tell()
        process = subprocess.Popen(
            run_command(study, run),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # Ctrl-C reaches the study alone, which then stops the run and waits for it
            env=os.environ | {"PYTHONUNBUFFERED": "1"},  # the error message is the last line of the log
        )
    stopped = ""
    try:
        _write_process_file(workdir, process.pid)
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        next_tick = 0.0
        while not _has_ended(process):
            now = time.monotonic()
            if now > deadline:
                stopped = f"stopped after {timeout:g} s (--timeout)"
                _stop_group(process, signal.SIGTERM, grace)
                break
            if now >= next_tick:
                next_tick = now + 0.5
                on_tick(run, reached_epoch(workdir))
            time.sleep(POLL_SECONDS)
    except BaseException:
        _stop_group(process, signal.SIGINT, grace)
        raise
    finally:
        _kill_group(process)  # workers that outlived the run
        process.wait()
    if stopped:
        return {"status": TIMEOUT, "reason": stopped, "exit_code": process.returncode}
    status, reason = explain_exit(process.returncode, last_message(log, begin))
    return {"status": status, "reason": reason, "exit_code": process.returncode}


def explain_exit(code: int, message: str) -> tuple[str, str]:
    """Exit code of a run, last message of its log -> status, reason."""
    if code == EXIT_OK:
        return FINISHED, ""
    if code == EXIT_DIVERGED:
        return DIVERGED, message or "the loss became NaN or infinite"
    if code in (EXIT_INTERRUPTED, EXIT_TERMINATED):
        return INTERRUPTED, f"interrupted from outside (exit code {code}); the same command goes on"
    if code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        return KILLED, f"killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
    if code == EXIT_USER_ERROR:
        return FAILED, message or "user error (exit code 2), see log.txt"
    return FAILED, f"exit code {code}: {message or 'see log.txt'}"


def _has_ended(process: subprocess.Popen) -> bool:
    # WNOWAIT leaves the process unreaped, so that its group id cannot pass to another before the group is killed.
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _stop_group(process: subprocess.Popen, how: signal.Signals, grace: float) -> None:
    """Asks the run to stop and gives it time for its checkpoint; a second Ctrl-C ends the waiting."""
    os.kill(process.pid, how)  # to the run alone: it stops its own workers
    with contextlib.suppress(KeyboardInterrupt):
        _wait_until(lambda: _has_ended(process), grace)


def _kill_group(process: subprocess.Popen) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _write_process_file(workdir: pathlib.Path, pid: int) -> None:
    import psutil

    with contextlib.suppress(psutil.NoSuchProcess):
        write_json(workdir / "process.json", {"pid": pid, "created": psutil.Process(pid).create_time()})


def _ended_unseen(workdir: pathlib.Path) -> bool:
    """The run came to its end, but the study was killed before it wrote the row."""
    return (workdir / "process.json").exists() and read_json(workdir / "summary.json").get("status") == FINISHED


def _stop_left_over(workdir: pathlib.Path, grace: float) -> None:
    """Ends a run whose study was killed: it checkpoints and the study goes on from there."""
    import psutil

    record = read_json(workdir / "process.json")
    with contextlib.suppress(psutil.Error, KeyError, TypeError, ValueError):
        process = psutil.Process(record["pid"])
        if abs(process.create_time() - record["created"]) > 0.01:
            return  # the number belongs to another process by now
        family = [process, *process.children(recursive=True)]
        process.terminate()
        _wait_until(lambda: _is_gone(process), grace)
        for member in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        _wait_until(lambda: all(map(_is_gone, family)), 5.0)


def _is_gone(process: "psutil.Process") -> bool:
    """Ended, if only as a zombie: in a container the first process may never reap it."""
    import psutil

    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _wait_until(happened: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not happened():
        time.sleep(POLL_SECONDS)


@contextlib.contextmanager
def _only_one_study(output_dir: pathlib.Path) -> Iterator[None]:
    import fcntl

    with open(output_dir / ".lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            message = f"--output_dir = {output_dir}: another study is running there; wait for it or use another"
            raise UserError(message) from None
        yield


def reached_epoch(workdir: pathlib.Path) -> float:
    return finite(last_metric(workdir, "epoch")) or 0.0


def last_message(path: pathlib.Path, begin: int = 0) -> str:
    """The last error of a log from `begin` on, all its lines, or else the last line; at most 400 characters."""
    with open(path, "rb") as file:
        file.seek(max(begin, os.path.getsize(path) - 16384))
        lines = [line.strip() for line in file.read().decode("utf-8", "replace").splitlines() if line.strip()]
    starts = [i for i, line in enumerate(lines) if line.startswith("error: ")]
    return " ".join(lines[starts[-1] if starts else -1 :]).removeprefix("error: ")[:400]


class Terminated(BaseException):
    """SIGTERM, as an exception, so that the run under way is stopped cleanly."""


def conduct(
    study: Study, runs: Sequence[Run], *, timeout: float | None, resume: bool
) -> tuple[int, dict[str, Any], str]:
    """Executes a study with a progress bar on stderr: (exit code, conclusion, Markdown table)."""

    def terminate(*_):
        raise Terminated

    check(study, runs, resume)  # before the bar is drawn
    before = signal.signal(signal.SIGTERM, terminate)
    code = EXIT_OK
    try:
        with Progress(runs) as progress:

            def on_row(row: Row, rows: list[Row]) -> None:
                write_results(study, rows)
                progress.row(row, rows)

            execute(study, runs, timeout=timeout, resume=resume, on_tick=progress.tick, on_row=on_row)
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    except Terminated:
        code = EXIT_TERMINATED
    finally:
        signal.signal(signal.SIGTERM, before)
    rows = list(load_rows(study).values())
    result, text = write_results(study, rows)
    if rows:
        write_plot(study, rows)
    if code == EXIT_OK and not result["finished"]:
        code = EXIT_NONE_FINISHED
    return code, result | {"results": str(study.output_dir / "results.json"), "exit_code": code}, text


class Progress:
    """A bar in units of epochs, with the time left and the best so far; a line on stderr for every row."""

    def __init__(self, runs: Sequence[Run]):
        import rich.console
        import rich.progress

        columns = ("{task.description}", rich.progress.BarColumn(), "{task.percentage:>3.0f} %", "{task.fields[note]}")
        self.bar = rich.progress.Progress(*columns, console=rich.console.Console(stderr=True), transient=True)
        self.epochs = {run.name: run.values["epochs"] for run in runs}
        self.task = self.bar.add_task("starting", total=sum(self.epochs.values()), note="")
        self.done: dict[str, Row] = {}
        self.best = ""
        self.current = ("", 0.0)  # run, when it began

    def __enter__(self) -> "Progress":
        self.bar.start()
        return self

    def __exit__(self, *_) -> None:
        self.bar.stop()

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
        note = " · ".join(
            filter(None, [f"epoch {epoch:.1f}/{self.epochs[run.name]}", left and f"{left} left", self.best])
        )
        self.bar.update(self.task, completed=before + epoch, description=run.name, note=note)

    def row(self, row: Row, rows: list[Row]) -> None:
        self.done[row["name"]] = row
        measured = [r for r in rows if r["status"] == FINISHED and r["probe_accuracy"] is not None]
        if measured:
            best = max(measured, key=lambda r: r["probe_accuracy"])
            self.best = f"best {best['probe_accuracy']:.1f} % ({best['name']})"
        figures = html.percent(row["probe_accuracy"]) if row["status"] == FINISHED else row["reason"]
        line = f"{row['name']}: {row['status']}, {figures}, {html.duration(row['attempt_seconds'])}"
        self.bar.console.print(line, markup=False, highlight=False, soft_wrap=True)


def time_left(done: Iterable[Row], epochs_left: float, epoch: float, elapsed: float) -> str:
    """Time for the epochs that are left: by the runs of this call, or by the first run while it is under way."""
    rates = [row["attempt_seconds"] / row["epochs"] for row in done if row["status"] == FINISHED]
    rate = statistics.median(rates) if rates else elapsed / epoch if epoch > 0 else None
    return html.duration(max(0.0, rate * (epochs_left - epoch))) if rate is not None else ""
