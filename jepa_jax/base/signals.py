"""Ctrl-C (SIGINT) and SIGTERM: a flag for code that must finish a step first, an exception for code that waits."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import NoReturn, Self

from jepa_jax.base.errors import EXIT_INTERRUPTED, EXIT_TERMINATED

Handler = Callable[[int, FrameType | None], None]
AGAIN_SECONDS = 0.01  # until a signal that came at a bad moment is sent again
EXIT_CODES = {signal.SIGINT: EXIT_INTERRUPTED, signal.SIGTERM: EXIT_TERMINATED}


class Interrupted(KeyboardInterrupt):
    """A stop that SIGINT or SIGTERM asked for; `exit_code` is the code the command ends with."""

    def __init__(self, signum: signal.Signals):
        super().__init__(signum.name)
        self.signum = signum
        self.exit_code = EXIT_CODES[signum]


class InterruptFlag:
    """Remembers a signal until `check` is called, so that a training step or a file is never cut short.

    Catches SIGINT and SIGTERM inside a `with` block. The previous handlers return after the first signal: a second one
    acts at once.
    """

    def __init__(self) -> None:
        self.raised: signal.Signals | None = None
        self._handlers = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._handlers.enter_context(_handling(self._catch))
        return self

    def __exit__(self, *exc: object) -> None:
        self._handlers.close()

    def _catch(self, signum: int, frame: FrameType | None) -> None:
        self.raised = signal.Signals(signum)
        self._handlers.close()

    def check(self) -> None:
        if self.raised is not None:
            raise Interrupted(self.raised)


@contextlib.contextmanager
def _handling(handler: Handler) -> Iterator[None]:
    """Installs a handler for both signals inside the block; does nothing outside the main thread."""
    is_main = threading.current_thread() is threading.main_thread()
    previous = {signum: signal.signal(signum, handler) for signum in (EXIT_CODES if is_main else ())}
    try:
        yield
    finally:
        for signum, before in previous.items():
            signal.signal(signum, before)


@contextlib.contextmanager
def acknowledged(say: Callable[[str], object]) -> Iterator[None]:
    """Says within the block that a signal has arrived, at once and from another thread.

    Python's own handlers wait until the main thread returns from XLA, which may compile for minutes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)

    def listen() -> None:
        numbers = {int(number): number.name for number in EXIT_CODES}
        name = next((numbers.get(byte) for byte in iter(lambda: os.read(reading, 1)[0], 0) if byte in numbers), None)
        if name:
            say(f"{name}: stopping as soon as the computation under way ends")

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.write(writing, b"\0")
        listener.join()
        os.close(reading)
        os.close(writing)


@contextlib.contextmanager
def signals_raise() -> Iterator[None]:
    """Raises Interrupted inside the block as soon as SIGINT or SIGTERM arrives."""

    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise Interrupted(signal.Signals(signum))

    def send_again(ignored: "sys.UnraisableHookArgs") -> None:
        """Python ignores what is raised in finalizers and in callbacks of its garbage collector; JAX has one."""
        if not isinstance(ignored.exc_value, Interrupted):
            return before(ignored)
        timer = threading.Timer(AGAIN_SECONDS, os.kill, (os.getpid(), ignored.exc_value.signum))
        timer.daemon = True  # starts without the locks that the interrupted code may hold
        timer.start()

    before, sys.unraisablehook = sys.unraisablehook, send_again
    try:
        with _handling(interrupt):
            yield
    finally:
        sys.unraisablehook = before


def signals_exit() -> contextlib.AbstractContextManager[None]:
    """Ends the process at once when SIGINT or SIGTERM arrives inside the block.

    For imports: an exception that is raised inside of one is sometimes swallowed, and there is nothing to save yet.
    """
    return _handling(lambda signum, frame: os._exit(EXIT_CODES[signal.Signals(signum)]))


def leave(code: int) -> NoReturn:
    """Ends a program whose work is done: Ctrl-C no longer interrupts what libraries do at the end, a second one kills.

    An exception there would be printed with its traceback, and keep this process from telling others that all is well.
    """
    signal.signal(signal.SIGINT, lambda signum, frame: signal.signal(signal.SIGINT, signal.SIG_DFL))
    sys.exit(code)
