"""Runs several processes that belong together: they share a terminal, get the same signals and end together."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import IO

POLL_SECONDS = 0.05
PR_SET_PDEATHSIG = 1  # Linux: the signal that a process gets when the one that started it is gone


def run_companions(command: Sequence[str], environments: Sequence[Mapping[str, str]], *, grace: float) -> int:
    """Runs a command once per environment until all have ended; returns the first exit code that is not 0.

    The first process has this one's streams; what the others print is shown on standard error, each line with their
    number. SIGINT and SIGTERM go to all of them. When one fails, the others have `grace` seconds to end by themselves.
    """
    began: list[subprocess.Popen[str]] = []
    previous = {signum: signal.signal(signum, _forward_to(began)) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        for index, environment in enumerate(environments):
            began.append(_start(command, environment, shown=index == 0))
        readers = [_show(process.stdout, index) for index, process in enumerate(began) if process.stdout]
        code = _wait_for_all(began, grace)
        for reader in readers:
            reader.join(timeout=grace)
        return code
    finally:
        for process in began:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with their workers
            process.wait()
        for signum, handler in previous.items():
            signal.signal(signum, handler)


def _start(command: Sequence[str], environment: Mapping[str, str], *, shown: bool) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        env=os.environ | {"PYTHONUNBUFFERED": "1"} | dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=None if shown else subprocess.PIPE,
        stderr=None if shown else subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # Ctrl-C reaches only this process, which passes it on once
        preexec_fn=_end_with_parent if sys.platform == "linux" else None,
    )


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _forward_to(processes: Sequence[subprocess.Popen[str]]) -> Callable[[int, FrameType | None], None]:
    def forward(signum: int, frame: FrameType | None) -> None:
        for process in processes:
            if process.poll() is None:
                process.send_signal(signum)

    return forward


def _show(stream: IO[str], index: int) -> threading.Thread:
    def copy() -> None:
        for line in stream:
            sys.stderr.write(f"[{index}] {line}")
            sys.stderr.flush()

    thread = threading.Thread(target=copy, name=f"output-{index}", daemon=True)
    thread.start()
    return thread


def _wait_for_all(processes: Sequence[subprocess.Popen[str]], grace: float) -> int:
    code, deadline = 0, float("inf")
    running = list(processes)
    while running and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
        for process in [one for one in running if one.poll() is not None]:
            running.remove(process)
            if process.returncode and not code:
                code, deadline = _exit_code(process.returncode), time.monotonic() + grace
    return code


def _exit_code(returncode: int) -> int:
    """Returns what a shell would: 128 + the signal that ended a process."""
    return 128 - returncode if returncode < 0 else returncode
