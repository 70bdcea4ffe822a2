"""The processes of one run: how they find each other, how they agree, and how they end when one of them is gone.

JAX connects processes and computes with all of their devices. Two things are added here. Processes agree on a signal
that one of them received by a vote, computed like a metric and read as late, so that no step waits for it. And each of
them holds a connection to the first one: the system closes it when a process dies, so the others know at once and end
with a message, where a collective operation would wait for ever.
"""

import atexit
import contextlib
import json
import os
import selectors
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from jepa_jax.base.errors import EXIT_PROCESS_LOST, UserError
from jepa_jax.config.groups import Config
from jepa_jax.config.schema import differing_keys
from jepa_jax.runtime.mesh import batch_sharding, replicated

VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
KUBERNETES_INDEX = "JOB_COMPLETION_INDEX"  # of a pod in an indexed Job
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
    if VARIABLES[0] in environment:
        arguments = _from_variables(environment)
    elif int(environment.get("SLURM_NTASKS", "1")) == 1 or "SLURM_PROCID" not in environment:
        return
    # Several programs with collectives at once could meet in different orders on different CPUs.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    try:
        jax.distributed.initialize(*arguments)
    except (RuntimeError, ValueError) as error:
        where = arguments[0] if arguments else "SLURM's first node"
        raise UserError(f"{where}: cannot connect to process 0 ({error}); is it running, and its port free?") from error
    if jax.process_count() > 1:
        _start_lifeline()


def _from_variables(environment: Mapping[str, str]) -> tuple[str, int, int]:
    values = dict(environment)
    if KUBERNETES_INDEX in values:
        values.setdefault(VARIABLES[2], values[KUBERNETES_INDEX])
    if missing := [name for name in VARIABLES if name not in values]:
        raise UserError(f"{VARIABLES[0]} is set but {' and '.join(missing)} is not; set all three")
    address, count, index = (values[name] for name in VARIABLES)
    if not (count.isdecimal() and index.isdecimal() and int(index) < int(count) and ":" in address):
        raise UserError(
            f"{VARIABLES[0]} = {address}, {VARIABLES[1]} = {count}, {VARIABLES[2]} = {index}: need HOST:PORT, a number "
            "of processes, and a number below it"
        )
    return address, int(count), int(index)


def is_first() -> bool:
    """Returns whether this process writes what a run leaves; the others only compute and save their shards."""
    return jax.process_index() == 0


def check_same_config(config: Config) -> None:
    """Raises UserError on every process if one of them has another config than the first."""
    if jax.process_count() == 1:
        return
    client = _client()
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


def _client() -> Any:
    return _distributed_state().client


def sum_over_processes(value: float) -> float:
    """Returns the sum of a number over all processes, each of which must call this."""
    if jax.process_count() == 1:
        return value
    return float(np.sum(multihost_utils.process_allgather(np.float64(value))))


class Votes:
    """Numbers that all processes see: the largest of what each of them says, without waiting for it."""

    def __init__(self, mesh: Mesh):
        self._sharding = batch_sharding(mesh)
        self._devices = len(self._sharding.addressable_devices)
        self._largest = jax.jit(jnp.max, out_shardings=replicated(mesh))
        self._ballots: dict[int, jax.Array] = {}

    def cast(self, number: int) -> jax.Array:
        """Returns the largest number that a process casts in this round, on the device."""
        if number not in self._ballots:
            own = np.full(self._devices, number, np.int32)
            with jax.transfer_guard("allow"):  # also between steps; each number is copied once
                self._ballots[number] = jax.make_array_from_process_local_data(self._sharding, own)
        return self._largest(self._ballots[number])


# --- the end of another process ---


class Lifeline:
    """Connections between the first process and each of the others; a thread ends this process when one of them does.

    A process that ends for a reason of its own says so in a line of JSON first, and the first process passes it on.
    """

    def __init__(self, index: int, connections: dict[int, socket.socket]):
        self._index, self._connections = index, connections
        self._leaving = threading.Event()
        self._failed_with: int | None = None  # exit code of a process that fails alone
        threading.Thread(target=self._watch, name="lifeline", daemon=True).start()

    def at_exit(self) -> None:
        """Tells the others that this process ends in good order; one that failed does not wait for them."""
        if self._failed_with is not None:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(self._failed_with)
        self._leaving.set()
        self._tell(self._index, "")

    def fail(self, error: BaseException) -> None:
        """Tells the others that this process fails, so that they end too.

        What is not known to be this one's own error may come from a collective operation with a process that is gone:
        the message about that is the one to show.
        """
        own = isinstance(error, UserError | KeyboardInterrupt)
        if self._leaving.wait(0.0 if own else 2 * OWN_END_SECONDS):
            threading.Event().wait()  # for the other thread, which ends this process
        self._failed_with = getattr(error, "exit_code", 1)
        self._leaving.set()
        self._tell(self._index, f"ended: {str(error).partition(chr(10))[0][:300] or type(error).__name__}")

    def _tell(self, process: int, why: str) -> None:
        line = json.dumps({"process": process, "why": why}).encode() + b"\n"
        for connection in self._connections.values():
            with contextlib.suppress(OSError):
                connection.sendall(line)

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            for process, connection in self._connections.items():
                selector.register(connection, selectors.EVENT_READ, process)
            while selector.get_map():
                for ready, _ in selector.select():
                    process, why = self._hear(ready.fileobj, ready.data)
                    selector.unregister(ready.fileobj)
                    if why:
                        self._end(process, why)

    def _hear(self, connection: Any, process: int) -> tuple[int, str]:
        """Returns which process ends, and why; "" if it ends in good order."""
        received = b""
        with contextlib.suppress(OSError, ValueError, KeyError):
            while not received.endswith(b"\n") and (more := connection.recv(65536)):
                received += more
            said = json.loads(received)
            return said["process"], said["why"]
        return process, GONE

    def _end(self, process: int, why: str) -> None:
        # At once where a process is gone: without the first one, JAX would soon end this one with a C++ stack trace.
        if self._leaving.wait(0.0 if why == GONE else OWN_END_SECONDS):
            return
        self._leaving.set()
        self._tell(process, why)  # the others are connected to the first process alone
        again = "start the same command again: it continues from the newest checkpoint"
        print(f"error: process {process} {why}; {again}", file=sys.stderr, flush=True)
        os._exit(EXIT_PROCESS_LOST)


_lifeline: Lifeline | None = None


def _start_lifeline() -> None:
    global _lifeline
    client, address = _client(), str(_distributed_state().coordinator_address)
    index, count = jax.process_index(), jax.process_count()
    if index == 0:
        with socket.create_server(("", 0), backlog=count) as server:
            client.key_value_set("jepa_jax/lifeline", str(server.getsockname()[1]))
            accepted = [server.accept()[0] for _ in range(count - 1)]
        connections = {int.from_bytes(connection.recv(4), "big"): connection for connection in accepted}
    else:
        port = int(client.blocking_key_value_get("jepa_jax/lifeline", 300_000))
        connections = {0: socket.create_connection((address.rpartition(":")[0].strip("[]"), port))}
        connections[0].sendall(index.to_bytes(4, "big"))
    for connection in connections.values():
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEPALIVE.items():
            if hasattr(socket, name):  # not on every system
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    _lifeline = Lifeline(index, connections)
    atexit.register(_lifeline.at_exit)


@contextlib.contextmanager
def together(*agreed: type[BaseException]) -> Iterator[None]:
    """Ends the other processes too if this one fails inside the block; all of them raise `agreed` exceptions."""
    try:
        yield
    except BaseException as error:
        if _lifeline and not isinstance(error, agreed):
            _lifeline.fail(error)
        raise
