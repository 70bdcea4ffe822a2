"""Counts what XLA compiles, so that a loop can say when it recompiles."""

import jax

_EVENT = "/jax/core/compile/backend_compile_duration"


class CompilationCounter:
    """Programs compiled (or read from the cache) and the seconds it took, from its creation on."""

    def __init__(self) -> None:
        self.count = 0
        self.seconds = 0.0
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event == _EVENT:
            self.count += 1
            self.seconds += duration_secs

    def __enter__(self) -> "CompilationCounter":
        return self

    def __exit__(self, *exc: object) -> None:
        jax.monitoring.unregister_event_duration_listener(self._listen)
