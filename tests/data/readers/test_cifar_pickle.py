"""The reader of CIFAR-10's pickles: right arrays of good files; of any other bytes one error, and no call."""

import pickle
import struct
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jepa_jax.data.readers.cifar import NotABatch, read_batch

PIXELS = np.random.default_rng(0).integers(0, 256, (5, 12), np.uint8)
LABELS = [0, 9, 3, 300, 4]


def pickled(protocol=3, **changes):
    batch = {"batch_label": b"testing", "labels": LABELS, "data": PIXELS, "filenames": [b"a.png"] * 5} | changes
    return pickle.dumps({name.encode(): value for name, value in batch.items()}, protocol=protocol)


def python_2_batch(pixels, labels):
    """Writes a batch opcode by opcode as Python 2 did."""

    def text(value):
        return b"U" + bytes([len(value)]) + value

    def number(value):
        return b"K" + bytes([value]) if value < 256 else b"M" + struct.pack("<H", value)

    content = pixels.tobytes()
    shape = number(len(pixels)) + number(pixels.shape[1])
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\nq\x06cnumpy\nndarray\nq\x07K\x00\x85q\x08" + text(b"b") + b"\x87Rq\x0a"
    )
    dtype = b"cnumpy\ndtype\nq\x0c" + text(b"u1") + b"K\x00K\x01\x87Rq\x0e(K\x03" + text(b"|")
    dtype += b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    state = b"(K\x01" + shape + b"\x86" + dtype + b"\x89T" + struct.pack("<i", len(content)) + content + b"tb"
    listed = b"]q\x05(" + b"".join(map(number, labels)) + b"e"
    return b"\x80\x02}q\x01(" + text(b"labels") + listed + text(b"data") + array + state + b"u."


def test_batches_of_python_2_and_3_are_read():
    for data in (pickled(3), pickled(4), python_2_batch(PIXELS, LABELS)):
        pixels, labels = read_batch(data)
        np.testing.assert_array_equal(pixels, PIXELS)
        assert labels == LABELS and pixels.dtype == np.uint8


def test_a_batch_of_the_official_size_is_read():
    pixels = np.random.default_rng(0).integers(0, 256, (10_000, 3072), np.uint8)
    names = [b"leptodactylus_pentadactylus_s_%06d.png" % i for i in range(10_000)]
    data = pickled(data=pixels, labels=list(range(10)) * 1000, filenames=names)
    np.testing.assert_array_equal(read_batch(data)[0], pixels)


CRASHES = (  # an object dtype whose flags are cleared, over bytes that are taken for a pointer
    b"\x80\x02}(U\x04datacnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R(K\x01K\x01\x85"
    b"cnumpy\ndtype\nU\x02O8K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89U\x08AAAAAAAAtb"
    b"U\x06labels](K\x00eu.",
    b"\x80\x02}(U\x04datacnumpy\nndarray\nK\x01\x85cnumpy\ndtype\nU\x02O8K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xff"
    b"J\xff\xff\xff\xffK\x00tbU\x08AAAAAAAA\x87RU\x06labels](K\x00eu.",
)
BOMBS = {
    "nested tuples": b"\x80\x02N" + b"\x85" * 500_000 + b".",
    "nested tuples as a dtype": python_2_batch(PIXELS, LABELS).replace(b"U\x02u1", b"N" + b"\x85" * 400_000),
    "nested calls": b"\x80\x02cnumpy\ndtype\nq\x00" + b"\x85h\x00\x85R" * 100_000 + b".",
    "a doubled tuple": b"\x80\x02N" + b"2\x86" * 1000 + b".",
    "a text encoded again and again": b"\x80\x02c_codecs\nencode\nq\x00X\x00\x00\x10\x00" + b"a" * (1 << 20)
    + b"q\x01X\x06\x00\x00\x00latin1q\x02" + b"h\x00h\x01h\x02\x86R" * 50_000 + b".",
    "a distant place in the memo": b"\x80\x02Nr\xff\xff\xff\xff.",
    "a text of 4 GB": b"\x80\x02X\xff\xff\xff\xffa.",
    "a claim of 8 GB": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 33) + b"a.",
    "a list that holds itself": b"\x80\x02]q\x00(h\x00e.",
    "many opcodes": b"\x80\x02" + b"N" * 500_000 + b".",
    "a huge integer": b"\x80\x02\x8b" + struct.pack("<i", 1 << 22) + b"\xff" * (1 << 22) + b".",
    "a shape of exabytes": python_2_batch(PIXELS, LABELS).replace(b"K\x05K\x0c", 2 * b"J\xff\xff\xff\x7f"),
}  # fmt: skip
READ_ALL = """
import pickle, resource, sys
import numpy
from jepa_jax.data.readers.cifar import NotABatch, read_batch
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (2 << 30),) * 2)
for name, data in pickle.load(sys.stdin.buffer).items():
    try:
        read_batch(data)
    except NotABatch as error:
        print(name, str(error)[:80])
    else:
        sys.exit(f"{name} was read")
"""


def test_hostile_pickles_neither_crash_nor_take_time_or_memory():
    cases = {f"crash {i}": data for i, data in enumerate(CRASHES)} | BOMBS
    ended = subprocess.run(
        [sys.executable, "-c", READ_ALL], input=pickle.dumps(cases), capture_output=True, timeout=600
    )
    assert ended.returncode == 0, ended.stderr.decode() + ended.stdout.decode()
    assert len(ended.stdout.splitlines()) == len(cases)


GOOD = [pickled(3), pickled(4), python_2_batch(PIXELS, LABELS)]
SNIPPETS = [
    b"\x80\x02", b"}", b"]", b"(", b")", b"N", b"\x88", b"K\x05", b"M\x00\x01", b"J\xff\xff\xff\xff", b"U\x04data",
    b"U\x06labels", b"U\x02u1", b"U\x02O8", b"X\x01\x00\x00\x00a", b"C\x01b", b"\x85", b"\x86", b"\x87", b"t", b"e",
    b"a", b"u", b"s", b"R", b"b", b"q\x00", b"h\x00", b"\x94", b"2", b"0", b"cnumpy\ndtype\n", b"cnumpy\nndarray\n",
    b"c_codecs\nencode\n", b"cnumpy.core.multiarray\n_reconstruct\n", b"cos\nsystem\n", b"\x93", b"\x81",
    b"o", b"Q", b".",
]  # fmt: skip


def check(data):
    try:
        pixels, labels = read_batch(data)
    except NotABatch:
        return
    assert pixels.dtype == np.uint8 and pixels.size <= len(data)
    assert all(type(label) is int for label in labels)


@settings(max_examples=400)
@given(st.lists(st.sampled_from(SNIPPETS), max_size=60))
def test_random_opcodes_give_an_error_or_bytes(parts):
    check(b"".join(parts) + b".")


@settings(max_examples=400)
@given(st.data())
def test_damaged_batches_give_an_error_or_bytes(data):
    batch = bytearray(data.draw(st.sampled_from(GOOD)))
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(batch) - 1))
        kind = data.draw(st.sampled_from(["flip", "cut", "insert"]))
        if kind == "flip":
            batch[place] = data.draw(st.integers(0, 255))
        elif kind == "cut":
            del batch[place : place + data.draw(st.integers(1, 30))]
        else:
            batch[place:place] = data.draw(st.sampled_from(SNIPPETS))
        if not batch:
            break
    check(bytes(batch))


@pytest.mark.parametrize(
    "changes",
    [{"data": PIXELS.T}, {"data": PIXELS.astype(np.int16)}, {"labels": [1.5]}, {"labels": b"12"}, {"data": 3}],
)
def test_other_content_is_refused(changes):
    with pytest.raises(NotABatch):
        read_batch(pickled(**changes))
