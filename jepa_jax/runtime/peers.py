"""The processes of one run: how they find each other, how they agree, and how they end when one of them is gone.

JAX connects processes and computes with all of their devices. Here each of them also holds a connection to the first
one: the system closes it when a process dies, so the others know at once and end with a message, where a collective
operation would wait for ever.
"""

import atexit
import concurrent.futures
import contextlib
import functools
import json
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jepa_jax.base.companions import LOOPBACK, PLACE_VARIABLES
from jepa_jax.base.errors import EXIT_INTERRUPTED, EXIT_PROCESS_LOST, UserError
from jepa_jax.config.groups import Config
from jepa_jax.config.schema import differing_keys

KUBERNETES_INDEX = "JOB_COMPLETION_INDEX"  # of a pod in an indexed Job
CONNECT_SECONDS = 300  # for all processes to start
OWN_END_SECONDS = 5.0  # for a process to end by itself when another one has: the same error often strikes all
GONE = "is gone: it was killed, or its machine or network failed"
# A machine that vanishes closes no connection: its silence is noticed after 5 + 3 x 5 seconds.
KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 3, "TCP_KEEPCNT": 5}


def connect(environment: Mapping[str, str]) -> None:
    """Connects this process to the others of its run, if the environment says that there are any.

    That is so under SLURM with several tasks, and if JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID are
    set; in an indexed Job of Kubernetes the last one is not needed.

    Raises:
      UserError: a variable is missing or not a number, or process 0 does not answer.
    """
    if jax.distributed.is_initialized():
        return
    arguments: tuple[Any, ...] = ()
    if PLACE_VARIABLES[0] in environment:
        arguments = _from_variables(environment)
    elif not _is_slurm_step(environment):
        return
    _keep_standard_output()
    if arguments and arguments[0].startswith(LOOPBACK):
        _let_gloo_use_loopback()
    # Several programs with collectives at once could meet in different orders on different CPUs.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    try:
        _hearing_signals(lambda: jax.distributed.initialize(*arguments))
        if jax.process_count() > 1:
            _hearing_signals(_start_lifeline)
    except (RuntimeError, ValueError, OSError) as error:
        where = arguments[0] if arguments else "SLURM's first node"
        raise UserError(f"{where}: cannot connect to process 0 ({error}); is it running, and its port free?") from error


def _keep_standard_output() -> None:
    """Leaves standard output to Python's own prints, the result of a command; Gloo's remarks go to standard error."""
    if sys.stdout is sys.__stdout__ and sys.stdout is not None:
        sys.stdout.flush()
        sys.stdout = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)


def _let_gloo_use_loopback() -> None:
    """Makes collectives of CPUs work on a machine whose own name does not resolve, which Gloo listens at otherwise."""
    with contextlib.suppress(OSError):
        socket.gethostbyname(socket.gethostname())
        return
    from jaxlib import _jax  # JAX has no option for the name

    _jax.make_gloo_tcp_collectives = functools.partial(_jax.make_gloo_tcp_collectives, hostname=LOOPBACK)


def _is_slurm_step(environment: Mapping[str, str]) -> bool:
    """Returns whether `srun` started this process as one of several; a batch script itself is no such step."""
    tasks = environment.get("SLURM_NTASKS", "1")
    if not tasks.isdecimal():
        raise UserError(f"SLURM_NTASKS = {tasks}: not a number; unset it, or start with srun")
    return int(tasks) > 1 and all(name in environment for name in ("SLURM_PROCID", "SLURM_STEP_NODELIST"))


def _hearing_signals(work: Callable[[], None]) -> None:
    """Does work that waits outside of Python, so that signals are heard meanwhile."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        done = pool.submit(work)
        try:
            while not concurrent.futures.wait([done], timeout=0.1).done:
                pass
        except KeyboardInterrupt as stop:  # nothing is open yet, and the thread cannot be ended
            os._exit(getattr(stop, "exit_code", EXIT_INTERRUPTED))
        done.result()


def _from_variables(environment: Mapping[str, str]) -> tuple[str, int, int]:
    values = dict(environment)
    if KUBERNETES_INDEX in values:
        values.setdefault(PLACE_VARIABLES[2], values[KUBERNETES_INDEX])
    if missing := [name for name in PLACE_VARIABLES if name not in values]:
        raise UserError(f"{PLACE_VARIABLES[0]} is set but {' and '.join(missing)} is not; set all three")
    address, count, index = (values[name] for name in PLACE_VARIABLES)
    if not (count.isdecimal() and index.isdecimal() and int(index) < int(count) and ":" in address):
        given = ", ".join(f"{name} = {values[name]}" for name in PLACE_VARIABLES)
        raise UserError(f"{given}: need HOST:PORT, a number of processes, and a number below it")
    return address, int(count), int(index)


def is_first() -> bool:
    """Returns whether this process writes what a run leaves; the others only compute and save their shards."""
    return jax.process_index() == 0


def check_same_config(config: Config) -> None:
    """Raises UserError on every process if one of them has another config than the first."""
    if jax.process_count() == 1:
        return
    client = _distributed_state().client
    client.key_value_set(f"jepa_jax/config/{jax.process_index()}", json.dumps(config.to_dict()), allow_overwrite=True)
    multihost_utils.sync_global_devices("jepa_jax configs")
    first, *others = (
        json.loads(client.blocking_key_value_get(f"jepa_jax/config/{i}", 60_000)) for i in range(jax.process_count())
    )
    for index, other in enumerate(others, start=1):
        if differing := differing_keys(first, other):
            listing = "\n  ".join(differing)
            raise UserError(f"process {index} has another config than process 0; give all the same:\n  {listing}")


def _distributed_state() -> Any:
    from jax._src import distributed  # the key-value store has no public name yet

    return distributed.global_state


def sum_over_processes(value: float) -> float:
    """Returns the sum of a number over all processes, each of which must call this."""
    if jax.process_count() == 1:
        return value
    return float(np.sum(multihost_utils.process_allgather(np.float64(value))))


# --- the end of another process ---


class Lifeline:
    """Connections between the first process and each of the others; a thread ends this process when one of them does.

    A process that ends for a reason of its own says so in a line of JSON first, and the first process passes it on.
    """

    def __init__(self, index: int, connections: dict[int, socket.socket]):
        self._index, self._connections = index, connections
        self._failing, self._ending = threading.Event(), threading.Event()  # this process by itself; for another one
        self._code = 0  # with which a process that fails exits
        self._threads = [threading.Thread(target=self._watch, args=one, daemon=True) for one in connections.items()]
        for thread in self._threads:
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
        self._code = getattr(error, "exit_code", 1)
        self._failing.set()
        self._tell(self._index, f"ended: {str(error).partition(chr(10))[0][:300] or type(error).__name__}", self._code)

    def _tell(self, process: int, why: str, code: int) -> None:
        line = json.dumps({"process": process, "why": why, "code": code}).encode() + b"\n"
        for connection in self._connections.values():
            with contextlib.suppress(OSError):
                connection.sendall(line)

    def _watch(self, process: int, connection: socket.socket) -> None:
        """Waits until a process ends, or says which other one does; one in good order gives no reason."""
        said: dict[str, Any] = {"process": process, "why": GONE, "code": EXIT_PROCESS_LOST}
        with contextlib.suppress(OSError, ValueError):
            said = json.loads(connection.makefile("rb").readline())
        if said["why"]:
            self._end(**said)

    def _end(self, process: int, why: str, code: int) -> None:
        # At once where a process is gone: without the first one, JAX would soon end this one with a C++ stack trace.
        # Otherwise the same error may be about to strike here, and then has its own message.
        if self._failing.wait(0.0 if why == GONE else OWN_END_SECONDS):
            return
        self._ending.set()
        self._tell(process, why, code)  # the others are connected to the first process alone
        again = "; start the same command again: it continues from the newest checkpoint" if why == GONE else ""
        print(f"error: process {process} {why}{again}", file=sys.stderr, flush=True)
        os._exit(code)


def _accept_others(count: int, publish: Callable[[int], None]) -> dict[int, socket.socket]:
    """Returns the connections of processes 1 to `count` - 1, which say their number first; no others are kept."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    connections: dict[int, socket.socket] = {}
    with socket.create_server(("", 0), family=family, backlog=count, dualstack_ipv6=both) as server:
        publish(server.getsockname()[1])
        server.settimeout(CONNECT_SECONDS)
        while len(connections) < count - 1:
            connection, _ = server.accept()
            connection.settimeout(10)
            with contextlib.suppress(OSError):
                said = int.from_bytes(connection.recv(4), "big")
                if 0 < said < count:
                    connections.setdefault(said, connection)
    return connections


_lifeline: Lifeline | None = None


def _start_lifeline() -> None:
    global _lifeline
    client, address = _distributed_state().client, str(_distributed_state().coordinator_address)
    index, count = jax.process_index(), jax.process_count()
    if index == 0:
        connections = _accept_others(count, lambda port: client.key_value_set("jepa_jax/lifeline", str(port)))
    else:
        port = int(client.blocking_key_value_get("jepa_jax/lifeline", 1000 * CONNECT_SECONDS))
        connections = {0: socket.create_connection((address.rpartition(":")[0].strip("[]"), port), CONNECT_SECONDS)}
        connections[0].sendall(index.to_bytes(4, "big"))
    for connection in connections.values():
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEPALIVE.items():
            if hasattr(socket, name):  # not on every system
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    _lifeline = Lifeline(index, connections)
    atexit.register(_lifeline.at_exit)


@contextlib.contextmanager
def fail_all(*agreed: type[BaseException]) -> Iterator[None]:
    """Makes the other processes exit too if this one fails inside the block, unless all raise this error.

    Args:
      agreed: exceptions that all processes raise after the same step, and that each of them handles itself.
    """
    try:
        yield
    except BaseException as error:
        if _lifeline and not isinstance(error, agreed):
            _lifeline.fail(error)
        raise
