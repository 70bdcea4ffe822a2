"""The processes of one run: how they connect, how they agree, and how one that fails ends the others."""

import atexit
import concurrent.futures
import contextlib
import ctypes
import functools
import itertools
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jepa_jax.base.companions import LOOPBACK
from jepa_jax.base.errors import EXIT_INTERRUPTED, UserError
from jepa_jax.config.schema import differing_keys
from jepa_jax.runtime.gpus import count_gpus
from jepa_jax.runtime.lifeline import BEAT_SECONDS, CONNECT_SECONDS, SILENT_BEATS, Lifeline, meet
from jepa_jax.runtime.places import Place, find_place

# After this time JAX ends a process by SIGABRT if another one hangs; the lifeline is to find it before, with a message.
JAX_PATIENCE = 10 * int(SILENT_BEATS * BEAT_SECONDS)

_lifeline: Lifeline | None = None
_hosts: list[str] = []  # of each process, if there are several
_agreements = itertools.count()  # the same on all processes: they agree on the same things in the same order


def connect(environment: Mapping[str, str]) -> None:
    """Connects this process to the others of its run, if the environment says that there are any."""
    if jax.distributed.is_initialized() or (place := find_place(environment)) is None:
        return
    if not _own_name_resolves():
        _do_without_own_name(place, environment)
    _keep_standard_output()
    # Several programs with collectives at once could meet in different orders on different CPUs.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    devices = place.device_ids(environment)
    if place.count > 1:
        _hearing_signals(lambda: _hold(meet(place)))
    try:
        _hearing_signals(lambda: _initialize(place, devices))
    except (RuntimeError, ValueError, OSError) as error:
        raise UserError(f"{place.address}: JAX cannot connect the processes ({error}); is the port free?") from error
    _hosts[:] = _share(socket.gethostname())


def _hold(lifeline: Lifeline) -> None:
    global _lifeline
    _lifeline = lifeline
    atexit.register(lifeline.at_exit)
    delay_abort()


def delay_abort() -> None:
    """Makes `abort` take six seconds, in which the lifeline ends this process with a message and a code of its own.

    Without process 0 a thread of JAX's aborts at once, often before the lifeline's thread has run. The handler is the C
    function `sleep` itself: it gets the number of the signal, 6, as its seconds, and needs no interpreter.
    """
    library = ctypes.CDLL(None)
    library.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
    library.signal(signal.SIGABRT, ctypes.cast(library.sleep, ctypes.c_void_p))


def _initialize(place: Place, devices: list[int] | None) -> None:
    jax.distributed.initialize(
        place.address,
        place.count,
        place.index,
        devices,
        cluster_detection_method="deactivate",
        coordinator_bind_address=place.bind_address,
        heartbeat_timeout_seconds=JAX_PATIENCE,
    )


def _keep_standard_output() -> None:
    """Leaves standard output to Python's own prints, the result of a command; Gloo's remarks go to standard error."""
    if sys.stdout is sys.__stdout__ and sys.stdout is not None:
        sys.stdout.flush()
        sys.stdout = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)


def _own_name_resolves() -> bool:
    """Returns whether this machine finds itself by its name, at which Gloo listens for the collectives of CPUs."""
    try:
        socket.gethostbyname(socket.gethostname())
    except OSError:
        return False
    return True


def _do_without_own_name(place: Place, environment: Mapping[str, str]) -> None:
    """Lets Gloo listen at 127.0.0.1 if all processes are on this machine; NCCL needs no name."""
    if place.host in (LOOPBACK, "localhost", "::1"):
        from jaxlib import _jax  # JAX has no option for the name

        _jax.make_gloo_tcp_collectives = functools.partial(_jax.make_gloo_tcp_collectives, hostname=LOOPBACK)
    elif not count_gpus(environment):
        name = socket.gethostname()
        raise UserError(
            f"{name}: this machine does not find itself by its own name, at which the others are to reach it; add a "
            f"line 'ADDRESS {name}' to its /etc/hosts, with the address that the others know"
        )


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


def is_first() -> bool:
    """Returns whether this process writes what a run leaves; the others only compute and save their shards."""
    return jax.process_index() == 0


def check_same(what: str, facts: Mapping[str, Any]) -> None:
    """Raises UserError on every process if one of them has other facts than the first, and names them."""
    first, *others = _share(facts)
    for index, other in enumerate(others, start=1):
        if lines := differing_keys(first, other, what):
            listing = "\n  ".join(lines)
            raise UserError(f"process {index} has another {what} than process 0; give all the same:\n  {listing}")


def _share(value: Any) -> list[Any]:
    """Returns what each process gives, in their order; every process must call this."""
    from jax._src import distributed  # the key-value store has no public name yet

    state, key = distributed.global_state, f"jepa_jax/shared/{next(_agreements)}"
    if state.client is None:
        return [value]
    state.client.key_value_set(f"{key}/{state.process_id}", json.dumps(value))
    keys = (f"{key}/{index}" for index in range(state.num_processes))
    return [json.loads(state.client.blocking_key_value_get(one, 1000 * CONNECT_SECONDS)) for one in keys]


def hosts() -> list[str]:
    return list(_hosts) or [socket.gethostname()] * jax.process_count()


def sum_over_processes(value: float) -> float:
    """Returns the sum of a number over all processes, each of which must call this."""
    if jax.process_count() == 1:
        return value
    return float(np.sum(multihost_utils.process_allgather(np.float64(value))))


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
