"""Runs several processes that belong together: they share a terminal, get the same signals and end together."""

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

from jepa_jax.base.errors import EXIT_PROCESS_LOST
from jepa_jax.base.processes import has_ended, kill_group

# Which of several processes this is: address of the first one, how many there are, number of this one.
PLACE_VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
Process = subprocess.Popen[str]
POLL_SECONDS = 0.05
ASKED_AFTER = 0.25  # of the grace time: then those that are left are asked to stop
PR_SET_PDEATHSIG = 1  # Linux: the signal that a process gets when the one that started it is gone


def run_companions(command: Sequence[str], environments: Sequence[Mapping[str, str]], *, grace: float) -> int:
    """Runs a command once per environment until all have ended; returns their common exit code.

    That is EXIT_PROCESS_LOST if one of them says that another is gone, or else that of the first one that failed.

    The first process has this one's streams; what the others print is shown on standard error, each line with their
    number. SIGINT and SIGTERM go to all of them. When one fails, the others have `grace` seconds to end by themselves;
    after a quarter of them they are asked to.
    """
    began: list[Process] = []
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
            kill_group(process)  # with their workers
            process.wait()
        for signum, handler in previous.items():
            signal.signal(signum, handler)


def _start(command: Sequence[str], environment: Mapping[str, str], *, shown: bool) -> Process:
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


def _forward_to(processes: Sequence[Process]) -> Callable[[int, FrameType | None], None]:
    def forward(signum: int, frame: FrameType | None) -> None:
        for process in processes:
            if not has_ended(process):
                os.kill(process.pid, signum)

    return forward


def _show(stream: IO[str], index: int) -> threading.Thread:
    def copy() -> None:
        for line in stream:
            sys.stderr.write(f"[{index}] {line}")
            sys.stderr.flush()

    thread = threading.Thread(target=copy, name=f"output-{index}", daemon=True)
    thread.start()
    return thread


def _wait_for_all(processes: Sequence[Process], grace: float) -> int:
    failed: list[int] = []
    asked, deadline = False, float("inf")
    running = list(processes)
    while running and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
        for process in [one for one in running if has_ended(one)]:
            running.remove(process)
            if code := exit_code(process):
                failed.append(code)
                deadline = min(deadline, time.monotonic() + grace)
        if not asked and time.monotonic() > deadline - grace * (1 - ASKED_AFTER):
            asked = True
            for process in running:
                os.kill(process.pid, signal.SIGTERM)  # one that still connects would wait for the other for minutes
    return EXIT_PROCESS_LOST if EXIT_PROCESS_LOST in failed else (failed or [0])[0]


def exit_code(process: Process) -> int:
    """Returns what a shell would of a process that has ended: 128 + the signal that ended it."""
    ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    assert ended is not None
    return ended.si_status if ended.si_code == os.CLD_EXITED else 128 + ended.si_status
