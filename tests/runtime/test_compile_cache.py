"""The cache of compiled programs: what is damaged never reaches XLA, and what crashed is not loaded again."""

import fcntl
import hashlib
import zlib

import pytest

from jepa_jax.runtime.compile_cache import ENTRY, LOADED_EVENT, LOADING, SUM, VerifiedCache

VALUE = zlib.compress(bytes(range(256)))


class Plain:
    """A cache of JAX: files without checksums."""

    def __init__(self, folder):
        self.folder = folder

    def get(self, key):
        path = self.folder / (key + ENTRY)
        return path.read_bytes() if path.exists() else None

    def put(self, key, value):
        path = self.folder / (key + ENTRY)
        if not path.exists():
            path.write_bytes(value)


@pytest.fixture
def opened(tmp_path):
    """Returns a function that opens the cache of one folder again, and the warnings of all of them."""
    warnings = []
    return lambda: VerifiedCache(Plain(tmp_path), tmp_path, warnings.append), warnings


@pytest.mark.parametrize("position", range(0, len(VALUE), 20))
@pytest.mark.parametrize("alone", [False, True])
def test_an_entry_with_a_flipped_bit_is_removed_with_one_warning_and_written_again(tmp_path, opened, position, alone):
    open_cache, warnings = opened
    cache = open_cache()
    cache.put("key", VALUE)
    flipped = bytearray(VALUE)
    flipped[position] ^= 4
    (tmp_path / f"key{ENTRY}").write_bytes(flipped)
    if alone:  # written by JAX without us, where zlib has a checksum
        (tmp_path / f"key{SUM}").unlink()
    assert cache.get("key") is None and len(warnings) == (position > 0 or not alone)
    assert not list(tmp_path.iterdir())
    cache.put("key", VALUE)
    assert open_cache().get("key") == VALUE


def test_processes_that_compile_one_program_at_once_leave_an_entry_that_counts(tmp_path, opened, monkeypatch):
    open_cache, warnings = opened
    other, (first, second) = zlib.compress(b"the same program, with another compile time"), (open_cache(), open_cache())
    write = VerifiedCache._write

    def write_after_the_other(cache, name, content):
        if name.endswith(ENTRY):
            monkeypatch.setattr(VerifiedCache, "_write", write)
            second.put("key", other)
        write(cache, name, content)

    monkeypatch.setattr(VerifiedCache, "_write", write_after_the_other)
    first.put("key", VALUE)  # its checksum, then all of the other's, then its entry
    assert open_cache().get("key") in (VALUE, other) and not warnings


@pytest.mark.parametrize("damage", [lambda value: value[:40], lambda value: b"", lambda value: b"(\xb5/\xfd" + value])
def test_a_truncated_or_foreign_entry_is_a_miss(tmp_path, opened, damage):
    cache = opened[0]()
    (tmp_path / f"key{ENTRY}").write_bytes(damage(VALUE))
    assert cache.get("key") is None and cache.get("key") is None
    assert not list(tmp_path.glob(f"*{ENTRY}"))


def test_a_whole_entry_that_jax_wrote_alone_is_used_and_gets_a_checksum(tmp_path, opened):
    (tmp_path / f"key{ENTRY}").write_bytes(VALUE)
    assert opened[0]().get("key") == VALUE
    assert (tmp_path / f"key{SUM}").read_text().strip() == hashlib.sha256(VALUE).hexdigest()


def test_an_entry_that_crashed_a_process_is_removed_by_the_next_one(tmp_path, opened):
    open_cache, warnings = opened
    open_cache().put("key", VALUE)
    (tmp_path / f"{LOADING}1").write_text("key")  # without a lock: its process has died
    (tmp_path / f"{LOADING}2").write_text("../../key")
    assert open_cache().get("key") is None
    assert "crashed the process that loaded it" in warnings[0] and not list(tmp_path.iterdir())


def test_an_entry_that_a_living_process_loads_is_left_alone(tmp_path, opened):
    open_cache, warnings = opened
    open_cache().put("key", VALUE)
    with (tmp_path / f"{LOADING}1").open("w") as marker:
        fcntl.flock(marker, fcntl.LOCK_EX)
        marker.write("key")
        marker.flush()
        assert open_cache().get("key") == VALUE and not warnings


def test_nothing_is_left_of_the_loading_of_an_entry(tmp_path, opened):
    cache = opened[0]()
    cache.put("key", VALUE)
    cache.get("key")
    assert [path.read_text() for path in tmp_path.glob(f"{LOADING}*")] == ["key"]
    cache.loaded(LOADED_EVENT, 0.1)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"key{ENTRY}", f"key{SUM}"]


def test_a_cache_that_cannot_be_written_is_still_read(tmp_path, opened, monkeypatch):
    (tmp_path / f"key{ENTRY}").write_bytes(VALUE)
    cache = opened[0]()

    def refuse(*arguments):
        raise PermissionError

    monkeypatch.setattr(VerifiedCache, "_write", refuse)
    assert cache.get("key") == VALUE
