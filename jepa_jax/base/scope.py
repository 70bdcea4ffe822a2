"""A flag that holds inside a `with` block."""

import contextlib
import contextvars
from collections.abc import Iterator


class Scope:
    """A flag that is true inside `with scope():`, for the thread or task that entered the block.

    Example:
      >>> for_gpus = Scope("for_gpus")
      >>> with for_gpus():
      ...     bool(for_gpus)
      True
    """

    def __init__(self, name: str):
        self._entered = contextvars.ContextVar(name, default=False)

    def __bool__(self) -> bool:
        return self._entered.get()

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        token = self._entered.set(True)
        try:
            yield
        finally:
            self._entered.reset(token)
