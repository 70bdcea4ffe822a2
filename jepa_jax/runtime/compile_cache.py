"""Verifies the entries of JAX's cache of compiled programs before XLA reads them: damaged machine code crashes."""

import contextlib
import fcntl
import functools
import hashlib
import os
import pathlib
import secrets
import threading
import zlib
from collections.abc import Callable
from typing import IO, Any

import jax

from jepa_jax.base.console import QuietConsole

ENTRY, SUM, LOADING = "-cache", "-sha256", "loading-"  # of the names of files; the first one is JAX's
ZLIB = b"\x78"  # how such data begin; they carry a checksum of their own
LOADED_EVENT = "/jax/compilation_cache/cache_retrieval_time_sec"  # of JAX, in the thread that has loaded an entry


class VerifiedCache:
    """A cache of JAX whose entries are written atomically, with checksums that are compared when they are read.

    While XLA loads an entry, a locked file tells which. The system unlocks it when a process crashes, and the next one
    then removes the entry.
    """

    def __init__(self, cache: Any, folder: pathlib.Path, warn: Callable[[str], None]):
        self._cache, self._path, self._warn = cache, folder, warn
        self._loading: dict[int, IO[bytes]] = {}  # by thread
        self._remove_crashed()

    def get(self, key: str) -> bytes | None:
        """Returns a whole entry; removes a damaged one."""
        value = self._cache.get(key)
        if value is None:
            return None
        digest, expected = _digest(value), self._expected(key)
        if not expected and _is_whole_zlib(value):  # of JAX alone, without zstandard
            expected = {digest}
            with contextlib.suppress(OSError):
                self._add_sum(key, digest)
        if digest not in expected:
            # Nothing is known of one without checksum, so that there is nothing to tell.
            self._remove(key, "is damaged" if expected or value.startswith(ZLIB) else "")
            return None
        self._note_loading(key)
        return value

    def put(self, key: str, value: bytes) -> None:
        """Writes an entry; this thread has compiled it, so that it loads no other one any more."""
        self._forget_loading()
        self._add_sum(key, _digest(value))
        if not getattr(self._cache, "eviction_enabled", False):
            self._write(key + ENTRY, value)  # JAX does not write atomically
        self._cache.put(key, value)  # does nothing if there is an entry

    def loaded(self, event: str, duration_secs: float, **_: str | int) -> None:
        """Forgets which entry this thread loads when JAX says that it is loaded; a listener of its events."""
        if event == LOADED_EVENT:
            self._forget_loading()

    def _forget_loading(self) -> None:
        if marker := self._loading.pop(threading.get_ident(), None):
            with contextlib.suppress(OSError):
                os.unlink(marker.name)
            marker.close()

    def _add_sum(self, key: str, digest: str) -> None:
        """Adds a checksum: several processes may compile one program at once, and any of their entries may stay."""
        with (self._path / (key + SUM)).open("ab", buffering=0) as file:
            file.write(f"\n{digest}\n".encode())

    def _expected(self, key: str) -> set[str]:
        """Returns the checksums that an entry may have; none are known of one that JAX wrote alone."""
        try:
            return set((self._path / (key + SUM)).read_text(errors="replace").split())
        except OSError:
            return set()

    def _remove(self, key: str, why: str) -> None:
        if why:
            self._warn(f"{self._path / (key + ENTRY)}: this compiled program {why}; it is removed and compiled again")
        for name in (key + ENTRY, key + SUM):
            with contextlib.suppress(OSError):
                (self._path / name).unlink()

    def _write(self, name: str, content: bytes) -> None:
        temporary = self._path / f".{name[:100]}.{secrets.token_hex(4)}"
        try:
            temporary.write_bytes(content)
            temporary.replace(self._path / name)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise  # JAX warns, and goes on

    def _note_loading(self, key: str) -> None:
        self._forget_loading()  # the one before, which JAX could not use
        with contextlib.suppress(OSError):  # a folder that cannot be written
            marker = (self._path / f"{LOADING}{secrets.token_hex(8)}").open("xb", buffering=0)
            fcntl.flock(marker, fcntl.LOCK_EX | fcntl.LOCK_NB)
            marker.write(key.encode())
            self._loading[threading.get_ident()] = marker

    def _remove_crashed(self) -> None:
        for path in self._path.glob(f"{LOADING}*"):
            with contextlib.suppress(OSError), path.open("rb") as marker:
                fcntl.flock(marker, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises while its process lives
                key = pathlib.PurePath(marker.read().decode(errors="replace")).name
                if (self._path / (key + ENTRY)).exists():
                    self._remove(key, "crashed the process that loaded it")
                path.unlink()


def _digest(value: bytes) -> str:
    return hashlib.sha256(value).hexdigest()


def _is_whole_zlib(value: bytes) -> bool:
    try:
        return value.startswith(ZLIB) and bool(zlib.decompress(value))
    except zlib.error:
        return False


@functools.cache  # once
def verify_compile_cache() -> None:
    """Makes JAX read its cache through `VerifiedCache`, from the next program on."""
    from jax._src import compilation_cache  # the cache cannot be replaced in public

    open_cache = getattr(compilation_cache, "get_file_cache", None)
    if open_cache is None:
        return

    def open_verified(path: str) -> Any:
        found = open_cache(path)
        if found is None or not pathlib.Path(path).is_dir():  # a remote one
            return found
        cache = VerifiedCache(found[0], pathlib.Path(path), QuietConsole().warn)
        jax.monitoring.register_event_duration_secs_listener(cache.loaded)
        return cache, path

    compilation_cache.get_file_cache = open_verified
    compilation_cache.reset_cache()  # perhaps it is open
