"""SIGINT and SIGTERM during training; several processes of one run stop after the same step."""

import collections
import signal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jepa_jax.base.signals import Interrupted, InterruptFlag
from jepa_jax.runtime.mesh import batch_sharding, replicated


class StopSignals(InterruptFlag):
    """Catches SIGINT and SIGTERM in a `with` block, for `check` to raise between steps.

    Several processes vote: behind each step they compute the largest signal number that one of them has received. The
    result is read as late as the metrics of the step, so that no step waits for it.
    """

    def __init__(self, mesh: Mesh):
        super().__init__()
        self._alone = jax.process_count() == 1
        self._sharding = batch_sharding(mesh)
        self._largest = jax.jit(jnp.max, out_shardings=replicated(mesh))
        self._ballots: dict[int, jax.Array] = {}  # by the signal number that they hold
        self._pending: collections.deque[jax.Array] = collections.deque()
        self._agreed = 0  # number of the signal that all processes act on

    def check(self) -> None:
        """Raises Interrupted if a signal has arrived and, with several processes, all of them know of it."""
        if self._alone:
            super().check()
        elif self._agreed:
            raise Interrupted(signal.Signals(self._agreed))

    def vote(self) -> None:
        """Tells the other processes, if any, which signal has arrived here; call it after each step."""
        if self._alone:
            return
        number = int(self.raised or 0)
        if number not in self._ballots:
            own = np.full(len(self._sharding.addressable_devices), number, np.int32)
            with jax.transfer_guard("allow"):  # also between steps; each number is copied once
                self._ballots[number] = jax.make_array_from_process_local_data(self._sharding, own)
        self._pending.append(self._largest(self._ballots[number]))

    def count_votes(self, *, lag: int) -> None:
        """Reads all but the newest `lag` votes."""
        while len(self._pending) > lag:
            self._agreed = max(self._agreed, int(jax.device_get(self._pending.popleft())))

    def agree(self) -> None:
        """Raises Interrupted if any process has received a signal; waits for all, so call it between computations."""
        self.vote()
        self.count_votes(lag=0)
        self.check()
