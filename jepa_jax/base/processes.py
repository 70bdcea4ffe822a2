"""Runs programs as processes, each with a log; stops them cleanly, with everything that they started."""

import contextlib
import dataclasses
import fcntl
import math
import os
import pathlib
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jepa_jax.base.errors import UserError
from jepa_jax.base.files import disk_error

if TYPE_CHECKING:
    import psutil

PACKAGE_PARENT = pathlib.Path(__file__).resolve().parents[2]
LOG = "log.txt"
LOG_BYTES, KEPT_BYTES = 16 * 2**20, 2**20  # of a log: its limit, and how much of its end is kept beyond
# Folders of the runs that a process belongs to; in the environment of all that `run` starts, and of their children.
RUN_VARIABLE = "JEPA_JAX_RUN"
POLL_SECONDS = 0.05
TICK_SECONDS = 0.5


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a process ended; `log` is the end of what it printed."""

    exit_code: int
    timed_out: bool
    log: str

    @property
    def lines(self) -> list[str]:
        return [line.strip() for line in self.log.splitlines() if line.strip()]

    @property
    def message(self) -> str:
        """The last error, or the last line, of the log; at most 400 characters."""
        starts = [i for i, line in enumerate(self.lines) if line.startswith("error: ")]
        return " ".join(self.lines[starts[-1] if starts else -1 :]).removeprefix("error: ")[:400]


def run(
    command: Sequence[str],
    folder: pathlib.Path,
    *,
    environment: Mapping[str, str] | None = None,
    timeout: float | None = None,
    grace: float,
    on_tick: Callable[[], None] = lambda: None,
) -> Ended:
    """Runs a command in its own process group, with its output in the log of `folder`, and waits for its end.

    Nothing that it has started is left then. Of a log that grows beyond LOG_BYTES the end is kept.

    Args:
      environment: variables set in addition to those of this process.
      timeout: seconds after which the process is asked to stop (SIGTERM).
      grace: seconds that it has to stop by itself, then or after an exception (SIGINT), before its group is killed.
      on_tick: called about twice per second.
    """
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / LOG
    with open(log, "ab") as output:
        begin = output.tell()
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # Ctrl-C reaches only this process, which then stops the other and waits for it
            env=os.environ
            | {"PYTHONUNBUFFERED": "1", RUN_VARIABLE: _joined(folder)}  # unbuffered: the log ends with the error
            | dict(environment or {}),
        )
    timed_out = False
    try:
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        next_tick = 0.0
        while not has_ended(process):
            now = time.monotonic()
            if now > deadline:
                timed_out = True
                stop_group(process, signal.SIGTERM, grace)
                break
            if now >= next_tick:
                next_tick = now + TICK_SECONDS
                begin = shorten(log, begin)
                on_tick()
            time.sleep(POLL_SECONDS)
    except BaseException:
        stop_group(process, signal.SIGINT, grace)
        raise
    finally:
        kill_group(process)  # workers that outlived it
        process.wait()
        stop_all(members(folder), grace=0.0)  # those that have left the group
    return Ended(process.returncode, timed_out, tail(log, shorten(log, begin)))


def has_ended(process: subprocess.Popen[Any]) -> bool:
    # WNOWAIT leaves the process unreaped, so that its group id is not reused before the group is killed.
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def stop_group(process: subprocess.Popen[bytes], how: signal.Signals, grace: float) -> None:
    """Asks a process to stop and gives it time for a checkpoint; a second Ctrl-C ends the wait."""
    os.kill(process.pid, how)  # to the process alone: it stops its own workers
    with contextlib.suppress(KeyboardInterrupt):
        wait_until(lambda: has_ended(process), grace)


def kill_group(process: subprocess.Popen[Any]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _joined(folder: pathlib.Path) -> str:
    return os.pathsep.join(filter(None, [os.environ.get(RUN_VARIABLE), str(folder.resolve())]))


def members(folder: pathlib.Path, *, below: bool = False) -> "list[psutil.Process]":
    """Returns the processes that belong to the run of `folder`, or to those of the folders directly in it.

    Their environment says so, which no file can claim of a process of somebody else.
    """
    import psutil

    found, wanted = [], folder.resolve()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            runs = map(pathlib.Path, filter(None, process.environ().get(RUN_VARIABLE, "").split(os.pathsep)))
            if process.pid != os.getpid() and any((run.parent if below else run) == wanted for run in runs):
                found.append(process)
    return found


def stop_all(found: "Sequence[psutil.Process]", grace: float) -> None:
    """Asks processes to stop that none of the others has started; kills what is left when they end, or after `grace`.

    psutil compares the time at which a process started before each signal, so that no other one of the same id gets it.
    """
    import psutil

    if grace:
        asked, ids = [], {process.pid for process in found}
        for process in found:
            with contextlib.suppress(psutil.Error):
                if process.ppid() not in ids:
                    process.terminate()
                    asked.append(process)
        wait_until(lambda: all(map(is_gone, asked)), grace)
    for process in found:
        with contextlib.suppress(psutil.Error):
            process.kill()
    wait_until(lambda: all(map(is_gone, found)), 5.0)


def is_gone(process: "psutil.Process") -> bool:
    """Returns whether a process has ended, also as a zombie, which a container's first process may never reap."""
    import psutil

    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_until(happened: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not happened():
        time.sleep(POLL_SECONDS)


def end_with_parent(every: float = 1.0) -> None:
    """Makes this process end with the one that started it, even if that one is killed with SIGKILL."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(every)
        os.killpg(os.getpgrp(), signal.SIGKILL)  # with its workers; started by `run`, it leads a group of its own

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()


def signal_name(exit_code: int) -> str:
    """Returns the name of the signal that a negative exit code stands for."""
    try:
        return signal.Signals(-exit_code).name
    except ValueError:
        return f"signal {-exit_code}"


def shorten(log: pathlib.Path, begin: int) -> int:
    """Drops all but the end of a log that is too long; returns where the part after byte `begin` now begins.

    Its writers append, so that they go on behind the new end.
    """
    size = os.path.getsize(log)
    if size <= LOG_BYTES:
        return begin
    kept = tail(log, size=KEPT_BYTES).encode()
    os.truncate(log, 0)
    with open(log, "ab") as file:
        file.write(b"[%d bytes were dropped here]\n" % (size - len(kept)) + kept)
    return 0


def tail(path: pathlib.Path, begin: int = 0, size: int = 16384) -> str:
    """Returns the end of a file after byte `begin`, at most `size` bytes."""
    with open(path, "rb") as file:
        file.seek(max(begin, os.path.getsize(path) - size))
        return file.read().decode("utf-8", "replace")


@contextlib.contextmanager
def only_one(lock_file: pathlib.Path, refusal: str) -> Iterator[None]:
    """Holds `lock_file` and removes it at the end; raises UserError if another process holds it.

    The system releases the lock of a process that is killed: a file that it left behind is in nobody's way.
    """
    with contextlib.ExitStack() as stack:
        try:
            lock = stack.enter_context(open(lock_file, "w"))
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            folder = os.open(lock_file.parent, os.O_RDONLY)
            stack.callback(os.close, folder)
            lock_folder(folder)
        except BlockingIOError:
            raise UserError(refusal) from None
        except OSError as error:
            raise disk_error(error, lock_file) from error
        if not same_file(lock.fileno(), lock_file):  # its last holder has removed it just now
            raise UserError(refusal)
        try:
            yield
        finally:
            if same_file(lock.fileno(), lock_file):
                lock_file.unlink()


def lock_folder(descriptor: int) -> None:
    """Locks a folder, because a lock file can be removed; raises BlockingIOError if another process holds it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        pass  # some network file systems lock no folders


def same_file(descriptor: int, path: pathlib.Path) -> bool:
    """Returns whether an open file or folder is what a path names now."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except OSError:
        return False


def num_cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def python_path() -> str:
    """Returns a PYTHONPATH with which another Python finds this package before others."""
    return os.pathsep.join(filter(None, [str(PACKAGE_PARENT), os.environ.get("PYTHONPATH", "")]))
