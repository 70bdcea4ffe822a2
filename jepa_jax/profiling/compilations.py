"""Compiles the training step ahead of time, and counts everything that XLA compiles."""

import threading
from collections.abc import Callable
from typing import Any

import jax

from jepa_jax.program.flops import Rules, jaxpr_flops

_EVENT = "/jax/core/compile/backend_compile_duration"
_CACHE_EVENT = "/jax/compilation_cache/cache_retrieval_time_sec"


class CompilationCounter:
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

    def __enter__(self) -> "CompilationCounter":
        return self

    def __exit__(self, *exc: object) -> None:
        jax.monitoring.unregister_event_duration_listener(self._listen)


class CompiledStep:
    """A jitted step that is compiled explicitly, once per shape of batch; a healthy run has one shape.

    Compiling ahead of time also gives the program's text and its number of operations, which are those of `useful`: a
    step that computes the same and nothing twice.
    """

    def __init__(self, jitted: Callable[..., Any], useful: Callable[..., Any] | None = None):
        self._jitted: Any = jitted
        self._useful: Any = useful or jitted
        self._compiled: dict[tuple, Any] = {}
        self._newest: Any = None
        self._text: str | None = None
        self.flops: int | None = None  # per step, of matrix products and convolutions

    @property
    def count(self) -> int:
        return len(self._compiled)

    def is_ready_for(self, batch: Any) -> bool:
        return _signature(batch) in self._compiled

    def compile(self, state: Any, batch: Any) -> Any:
        """Compiles the step for a shape of batch; returns the lowered program (jax.stages.Lowered)."""
        traced = self._jitted.trace(state, batch)
        self.flops = traced_flops(traced if self._useful is self._jitted else self._useful.trace(state, batch))
        lowered = traced.lower()
        self._newest = self._compiled[_signature(batch)] = lowered.compile()
        self._text = None
        return lowered

    def __call__(self, state: Any, batch: Any) -> tuple[Any, dict[str, jax.Array]]:
        return self._compiled[_signature(batch)](state, batch)

    def text(self) -> str:
        """Returns the text of the newest compiled program."""
        if self._text is None:
            self._text = self._newest.as_text()
        return self._text


def traced_flops(traced: Any) -> int:
    """Returns the operations of a traced function on this process's platform."""
    backend = jax.default_backend()
    return jaxpr_flops(traced.jaxpr.jaxpr, Rules(platform="cuda" if backend == "gpu" else backend))


def _signature(batch: Any) -> tuple:
    return tuple((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(batch))
