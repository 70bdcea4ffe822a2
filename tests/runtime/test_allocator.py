"""The heap of a process of its own: what stays in it when it is freed, and free memory between used blocks."""

import subprocess
import sys

import pytest

from jepa_jax.runtime.allocator import malloc_account

needs_glibc = pytest.mark.skipif(malloc_account() is None, reason="needs the malloc of glibc 2.33 or newer")

FRAGMENTED = """
import ctypes, mmap
from jepa_jax.runtime import allocator

assert allocator.keep_freed_memory()
libc = ctypes.CDLL("libc.so.6")
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
sizes = [1500 + 37 * (i % 400) for i in range({blocks})]
blocks = [libc.malloc(size) for size in sizes]
used = blocks[1::2]
for block, size in zip(blocks, sizes):
    ctypes.memset(block, 7, size)
for block in blocks[::2]:
    libc.free(block)

def gaps():
    account = allocator.malloc_account()
    return account.fordblks - account.keepcost

def whole_pages(block, size):
    return range(-(-block // mmap.PAGESIZE) * mmap.PAGESIZE, block + size - mmap.PAGESIZE, mmap.PAGESIZE)

before = gaps()
aside = allocator.set_gaps_aside()
assert all(ctypes.string_at(block, 1500) == bytes([7]) * 1500 for block in used)
pages = [page for block, size in list(zip(blocks, sizes))[::2] for page in whole_pages(block, size)]
print(before, aside, gaps(), len(pages), sum(ctypes.string_at(page, 8) == bytes(8) for page in pages))
"""

FREED = """
import ctypes
from jepa_jax.runtime import allocator

assert allocator.keep_freed_memory()
libc = ctypes.CDLL("libc.so.6")
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.sbrk.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
before = libc.sbrk(0)
blocks = [libc.malloc({size}) for _ in range({count})]  # never touched, so that it takes no memory
if not all(blocks):
    raise SystemExit("no room")
full = libc.sbrk(0)
for block in blocks:
    libc.free(block)
print(full - before, libc.sbrk(0) - before)
"""


def printed(program: str) -> list[int]:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    if done.stderr == "no room\n":
        pytest.skip("the system grants no gigabytes, not even untouched")
    assert done.returncode == 0, done.stderr
    return [int(word) for word in done.stdout.split()]


def run(blocks: int) -> list[int]:
    return printed(FRAGMENTED.format(blocks=blocks))


@needs_glibc
@pytest.mark.parametrize("count", [1, 3])
def test_freed_memory_stays_in_the_process_also_beyond_two_gibibytes(count):
    size = 2**30 - 2**20
    grown, kept = printed(FREED.format(size=size, count=count))
    assert kept == grown > 0.99 * count * size


@needs_glibc
def test_many_gaps_are_set_aside_and_used_blocks_stay_as_they_are():
    before, aside, left, pages, returned = run(40_000)
    assert before > 100e6
    assert aside > 0.9 * before and left < 0.1 * before
    assert returned > 0.5 * pages > 0  # a page that was given back to the system reads as zeros


@needs_glibc
def test_a_few_gaps_are_left_alone():
    assert run(2_000)[1] == 0
