"""A flag, or a value, that holds inside a `with` block."""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any


class Scope:
    """True inside `with scope():`, for the thread or task that entered the block; `with scope(value):` sets a value.

    Example:
      >>> for_gpus = Scope("for_gpus")
      >>> with for_gpus():
      ...     bool(for_gpus)
      True
    """

    def __init__(self, name: str):
        self._current = contextvars.ContextVar[Any](name, default=None)

    @property
    def value(self) -> Any:
        """What the innermost block has set; None outside."""
        return self._current.get()

    def __bool__(self) -> bool:
        return bool(self.value)

    @contextlib.contextmanager
    def __call__(self, value: Any = True) -> Iterator[Any]:
        token = self._current.set(value)
        try:
            yield value
        finally:
            self._current.reset(token)
