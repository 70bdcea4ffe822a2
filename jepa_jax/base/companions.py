"""Runs several processes that belong together: they share a terminal, get the same signals and end together."""

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import IO

from jepa_jax.base.errors import EXIT_PROCESS_LOST
from jepa_jax.base.processes import POLL_SECONDS, has_ended, kill_group

# Which of several processes this is: address of the first one, how many there are, number of this one.
PLACE_VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
TOKEN_VARIABLE = "JEPA_JAX_TOKEN"  # a secret that all processes of a run share; others are not let in
LOOPBACK = "127.0.0.1"
ASKED_AFTER = 0.25  # of the grace time: then those that are left are asked to stop
PR_SET_PDEATHSIG = 1  # Linux: the signal that a process gets when the one that started it is gone


@contextlib.contextmanager
def local_address() -> Iterator[str]:
    """Yields an address for the first process on this machine; its port is kept from others inside the block."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the first process does: it may bind and listen
        held.bind((LOOPBACK, 0))
        yield f"{LOOPBACK}:{held.getsockname()[1]}"


def run_companions(command: Sequence[str], environments: Sequence[Mapping[str, str]], *, grace: float) -> int:
    """Runs a command once per environment until all have ended; returns their common exit code.

    That is EXIT_PROCESS_LOST if one of them says that another is gone, or else that of the first one that failed.

    The first process has this one's streams; what the others print is shown on standard error, each line with their
    number. SIGINT and SIGTERM go to all of them. When one fails, the others have `grace` seconds to end by themselves;
    after a quarter of them they are asked to.
    """
    running: list[subprocess.Popen[str]] = []
    readers: list[threading.Thread] = []

    def forward(signum: int, frame: FrameType | None = None) -> None:
        for process in running:
            if not has_ended(process):
                os.kill(process.pid, signum)

    previous = {signum: signal.signal(signum, forward) for signum in (signal.SIGINT, signal.SIGTERM)}
    failed: list[int] = []
    asked, deadline = False, float("inf")
    try:
        for index, environment in enumerate(environments):
            running.append(_start(command, environment, shown=index == 0))
            if output := running[-1].stdout:
                readers.append(threading.Thread(target=_show, args=(output, index), daemon=True))
                readers[-1].start()
        while running and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
            for process in list(filter(has_ended, running)):
                running.remove(process)
                kill_group(process)  # its workers, while its number is still taken
                if code := process.wait():
                    failed.append(code if code > 0 else 128 - code)  # as a shell does for signals
                    deadline = min(deadline, time.monotonic() + grace)
            if not asked and time.monotonic() > deadline - grace * (1 - ASKED_AFTER):
                asked = True
                forward(signal.SIGTERM)  # one that still connects would wait for the other for minutes
        return EXIT_PROCESS_LOST if EXIT_PROCESS_LOST in failed else (failed or [0])[0]
    finally:
        for process in running:
            kill_group(process)
            process.wait()
        for reader in readers:
            reader.join(timeout=grace)
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


def _show(stream: IO[str], index: int) -> None:
    for line in stream:
        sys.stderr.write(f"[{index}] {line}")
        sys.stderr.flush()
