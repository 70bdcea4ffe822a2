"""Connections between the first process of a run and each of the others: how they meet, and how they end together.

The system closes a connection when a process dies, so the others know at once and end with a message, where a
collective operation would wait for ever. JAX's coordination service cannot do this: it ends a process by SIGABRT, and a
callback of Python's is one that jaxlib cannot call (its status has no form in Python).

Messages are lines of JSON; an empty line is a beat, which says that the process is not stuck.
"""

import contextlib
import hmac
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from jepa_jax.base.errors import EXIT_INTERRUPTED, EXIT_PROCESS_LOST, UserError
from jepa_jax.runtime.places import ANY, Place

CONNECT_SECONDS = 300  # for all processes to start
ANSWER_SECONDS = 10.0  # for a process to say who it is, or for the first one to say that it is expected
RETRY_SECONDS = 0.2
BEAT_SECONDS = 5.0
SILENT_BEATS = 12  # missed in a row: then the process hangs, or its machine is gone
OWN_END_SECONDS = 5.0  # for a process to end by itself when another one has: the same error often strikes all
GONE = "is gone: it was killed, or its machine or network failed"
SILENT = f"has not answered for {SILENT_BEATS * BEAT_SECONDS:.0f} s: it hangs, or its machine or network failed"
LONGEST_LINE = 65536


class Lifeline:
    """Connections to other processes; a thread ends this process when one of them does.

    A process that ends for a reason of its own says so in a line of JSON first, and the first process passes it on.
    """

    def __init__(self, index: int, connections: dict[int, socket.socket]):
        self._index, self._connections = index, connections
        self._failing, self._ending = threading.Event(), threading.Event()  # this process by itself; for another one
        self._code = 0  # with which a process that fails exits
        self._sending = threading.Lock()
        self._threads = [threading.Thread(target=self._watch, args=one, daemon=True) for one in connections.items()]
        for thread in [*self._threads, threading.Thread(target=self._beat, daemon=True)]:
            thread.start()

    def at_exit(self) -> None:
        """Tells the others that this process ends in good order; one that failed does not wait for them."""
        if self._failing.is_set():
            sys.stdout.flush()
            sys.stderr.flush()
            if self._index == 0:  # without it JAX ends the others, before they have said why
                for thread in self._threads:
                    thread.join(OWN_END_SECONDS + 1)
            os._exit(self._code)
        self._tell(self._index, "", 0)

    def fail(self, error: BaseException) -> None:
        """Tells the others that this process fails, so that they end too.

        What is not known to be this one's own error may come from a collective operation with a process that is gone:
        the message about that is the one to show.
        """
        if self._failing.is_set():
            return
        own = isinstance(error, UserError | KeyboardInterrupt)
        if self._ending.wait(0.0 if own else 2 * OWN_END_SECONDS):
            threading.Event().wait()  # for the other thread, which ends this process
        self._code = getattr(error, "exit_code", EXIT_INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1)
        self._failing.set()
        self._tell(self._index, f"ended: {str(error).partition(chr(10))[0][:300] or type(error).__name__}", self._code)

    def _tell(self, process: int, why: str, code: int) -> None:
        self._send(json.dumps({"process": process, "why": why, "code": code}).encode())

    def _send(self, line: bytes) -> None:
        with self._sending:
            for connection in self._connections.values():
                with contextlib.suppress(OSError):
                    connection.sendall(line + b"\n")

    def _beat(self) -> None:
        while True:
            time.sleep(BEAT_SECONDS)
            self._send(b"")

    def _watch(self, process: int, connection: socket.socket) -> None:
        """Waits until a process ends, or says which other one does; one in good order gives no reason."""
        try:
            said = next(filter(None, _lines(connection)))
        except TimeoutError:
            said = _farewell(process, SILENT)
        except (OSError, StopIteration):
            said = _farewell(process, GONE)
        try:
            message = json.loads(said)
            who, why, code = int(message["process"]), str(message["why"]), int(message["code"])
        except (ValueError, KeyError, TypeError, RecursionError):
            who, why, code = process, GONE, EXIT_PROCESS_LOST
        if why:
            self._end(who, "".join(filter(str.isprintable, why)), code if 0 < code < 256 else EXIT_PROCESS_LOST)

    def _end(self, process: int, why: str, code: int) -> None:
        # At once where a process is gone: without the first one, JAX would soon end this one with a C++ stack trace.
        # Otherwise the same error may be about to strike here, and then has its own message.
        lost = why in (GONE, SILENT)
        if self._failing.wait(0.0 if lost else OWN_END_SECONDS):
            return
        self._ending.set()
        self._tell(process, why, code)  # the others are connected to the first process alone
        again = "; start the same command again: it continues from the newest checkpoint" if lost else ""
        print(f"error: process {process} {why}{again}", file=sys.stderr, flush=True)
        os._exit(code)


def _farewell(process: int, why: str) -> bytes:
    return json.dumps({"process": process, "why": why, "code": EXIT_PROCESS_LOST}).encode()


def _lines(connection: socket.socket) -> Iterator[bytes]:
    """Yields lines until the connection is closed; raises TimeoutError after SILENT_BEATS beats without a byte.

    Beats are counted, not seconds: when this process itself was stopped, it has not heard the others meanwhile.
    """
    connection.settimeout(BEAT_SECONDS)
    silent, rest = 0, b""
    while True:
        try:
            received = connection.recv(4096)
        except TimeoutError:
            silent += 1
            if silent == SILENT_BEATS:
                raise
            continue
        if not received or len(rest) > LONGEST_LINE:
            return
        silent, (*lines, rest) = 0, (rest + received).split(b"\n")
        yield from lines


# --- how they meet ---


def meet(place: Place) -> Lifeline:
    """Waits until all processes of a run are there; the port is free again afterwards, for JAX's own service."""
    return Lifeline(place.index, _accept_others(place) if place.index == 0 else {0: _join_first(place)})


def _accept_others(place: Place) -> dict[int, socket.socket]:
    connections: dict[int, socket.socket] = {}
    deadline = time.monotonic() + CONNECT_SECONDS
    try:
        with _listen(place) as server:
            while missing := [index for index in range(1, place.count) if index not in connections]:
                server.settimeout(max(0.01, deadline - time.monotonic()))
                try:
                    connection, (caller, *_) = server.accept()
                except TimeoutError:
                    names = ", ".join(map(str, missing[:8]))
                    raise UserError(f"process {names} of {place.count} did not come to {place.address}") from None
                if (index := _greet(connection, caller, place, connections)) is not None:
                    connections[index] = connection
    except UserError as error:
        for connection in connections.values():
            _say(connection, {"refused": str(error)})
        raise
    for connection in connections.values():
        _say(connection, {"welcome": place.count})
    return connections


def _listen(place: Place) -> socket.socket:
    host, _, port = place.bind_address.rpartition(":")
    everywhere = host == ANY and socket.has_dualstack_ipv6()
    name = "" if host == ANY else host.strip("[]")
    family = socket.AF_INET6 if everywhere or ":" in name else socket.AF_INET
    try:
        return socket.create_server((name, int(port)), family=family, backlog=place.count, dualstack_ipv6=everywhere)
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        fix = "is it an address of this machine, and no other process 0 under way? give a free port"
        raise UserError(f"{place.address}: process 0 cannot listen there ({reason}); {fix}") from error


def _greet(connection: socket.socket, caller: str, place: Place, come: dict[int, socket.socket]) -> int | None:
    """Returns the number of a process that belongs to the run, or None; what does not is told so and dropped."""
    said = _hear(connection, ANSWER_SECONDS)
    index, token = said.get("process"), said.get("token")
    known = isinstance(token, str) and hmac.compare_digest(token.encode(), place.token.encode())
    if not known or not isinstance(index, int) or said.get("count") != place.count or not 0 <= index < place.count:
        _say(connection, {"refused": f"{place.address} belongs to another run; give each run its own port"})
        connection.close()
        return None
    if index == 0 or index in come:
        reason = f"two processes say that they are number {index} of {place.count} (one at {caller}); number them apart"
        _say(connection, {"refused": reason})
        raise UserError(reason)
    _say(connection, {"expected": place.count})
    return index


def _join_first(place: Place) -> socket.socket:
    deadline = time.monotonic() + CONNECT_SECONDS
    while True:
        try:
            connection = socket.create_connection((place.host, place.port), ANSWER_SECONDS)
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise UserError(f"{place.address}: process 0 does not answer ({error}); is it running?") from error
            time.sleep(RETRY_SECONDS)
    _say(connection, {"process": place.index, "count": place.count, "token": place.token})
    other = f"what answers at {place.address} is not process 0 of a run that starts; give a free port"
    if "refused" in (said := _hear(connection, ANSWER_SECONDS)) or "expected" not in said:
        raise UserError(str(said.get("refused", other)))
    if "welcome" not in (said := _hear(connection, CONNECT_SECONDS)):
        raise UserError(str(said.get("refused", "process 0 ended before all processes had come; its message says why")))
    return connection


def _say(connection: socket.socket, message: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):
        connection.sendall(json.dumps(message).encode() + b"\n")


def _hear(connection: socket.socket, seconds: float) -> dict[str, Any]:
    """Returns one message, or an empty one if something else came, or nothing; reads no byte more."""
    connection.settimeout(seconds)
    line = b""
    try:
        while not line.endswith(b"\n") and len(line) < LONGEST_LINE:
            if not (byte := connection.recv(1)):
                return {}
            line += byte
        said = json.loads(line)
    except (OSError, ValueError, RecursionError):
        return {}
    return said if isinstance(said, dict) else {}
