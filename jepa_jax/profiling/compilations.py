"""Compiles the training step ahead of time, and counts everything that XLA compiles."""

import collections
import contextlib
import dataclasses
import threading
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import jax

from jepa_jax.compiled.flops import Rules, jaxpr_flops
from jepa_jax.runtime.allocator import set_gaps_aside

REMEMBERED = 16  # steps
_EVENT = "/jax/core/compile/backend_compile_duration"
_CACHE_EVENT = "/jax/compilation_cache/cache_retrieval_time_sec"


class CompilationCounter(contextlib.AbstractContextManager):
    """Counts programs that are compiled (or read from the cache) and the seconds this takes.

    `on_seconds` is called for each compilation in the thread that created the counter.
    """

    def __init__(self, on_seconds: Callable[[float], None] = lambda seconds: None) -> None:
        self.count = self.from_cache = 0
        self.seconds = 0.0
        self._on_seconds, self._thread = on_seconds, threading.get_ident()
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **_: str | int) -> None:
        self.from_cache += event == _CACHE_EVENT
        if event == _EVENT:
            self.count += 1
            self.seconds += duration_secs
            if threading.get_ident() == self._thread:
                self._on_seconds(duration_secs)

    def __exit__(self, *exc: object) -> None:
        jax.monitoring.unregister_event_duration_listener(self._listen)


@dataclasses.dataclass
class _Program:
    compiled: Any
    flops: int
    text: str | None = None


class CompiledStep:
    """A jitted step that is compiled explicitly, once per shape of batch: one, or one per bucket of the data.

    Compiling ahead of time also gives the program's text and its number of operations, which are those of `useful`: a
    step that computes the same and nothing twice.

    Attributes:
      calls: steps taken so far.
      total_flops: their operations, of matrix products and convolutions.
    """

    def __init__(
        self,
        jitted: Callable[..., Any],
        useful: Callable[..., Any] | None = None,
        signature: Callable[[Any], Hashable] | None = None,
    ):
        """`signature` tells batches of different shapes apart; by default a batch is a dict of arrays."""
        self._jitted: Any = jitted
        self._useful: Any = useful or jitted
        self._signature = signature or _signature
        self._programs: dict[Hashable, _Program] = {}
        self._ran: collections.deque[_Program] = collections.deque(maxlen=REMEMBERED)
        self.calls = self.total_flops = 0

    @property
    def count(self) -> int:
        return len(self._programs)

    @property
    def flops(self) -> float | None:
        """Operations per step: the mean of those taken so far, or those of the newest program before the first one."""
        if self.calls:
            return self.total_flops / self.calls
        return next(reversed(self._programs.values())).flops if self._programs else None

    def is_ready_for(self, batch: Any) -> bool:
        return self._signature(batch) in self._programs

    def compile(self, state: Any, batch: Any) -> Any:
        """Compiles the step for a shape of batch; returns the lowered program (jax.stages.Lowered)."""
        traced = self._jitted.trace(state, batch)
        flops = traced_flops(traced if self._useful is self._jitted else self._useful.trace(state, batch))
        lowered = traced.lower()
        self._programs[self._signature(batch)] = _Program(lowered.compile(), flops)
        set_gaps_aside()
        return lowered

    def __call__(self, state: Any, batch: Any) -> Any:
        program = self._programs[self._signature(batch)]
        self._ran.append(program)
        self.calls += 1
        self.total_flops += program.flops
        return program.compiled(state, batch)

    @property
    def peak_bytes(self) -> int:
        """Memory of a device that the newest program needs, its arguments included."""
        return next(reversed(self._programs.values())).compiled.memory_analysis().peak_memory_in_bytes

    def were_alike(self, steps: int) -> bool:
        """Returns whether the last steps, at most REMEMBERED, ran the same program."""
        return all(program is self._ran[-1] for program in list(self._ran)[-steps:])

    def text(self) -> str:
        """Returns the text of the program that ran last, or of the newest one."""
        program = self._ran[-1] if self._ran else next(reversed(self._programs.values()))
        if program.text is None:
            program.text = program.compiled.as_text()
        return program.text


def traced_flops(traced: Any) -> int:
    """Returns the operations of a traced function on this process's platform."""
    backend = jax.default_backend()
    return jaxpr_flops(traced.jaxpr.jaxpr, Rules(platform="cuda" if backend == "gpu" else backend))


def _signature(batch: Mapping[str, Any]) -> Hashable:
    """Returns name, shape and type of each array, in no order."""
    return frozenset([(name, array.shape, array.dtype) for name, array in batch.items()])
