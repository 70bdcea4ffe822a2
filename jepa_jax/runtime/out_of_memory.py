"""Recognises messages which say that memory ran out, for trials, their logs and training."""

import resource

# What malloc, XLA, CUDA, cuDNN, LLVM, Python and the loader of libraries say; in lower case.
WORDS = (
    "resource_exhausted", "out of memory", "error_out_of_memory", "status_alloc_failed", "bad_alloc", "memoryerror",
    "cannot allocate memory", "unable to allocate", "failed to allocate", "failed to map segment",
    "memory allocation",
)  # fmt: skip
# No room for the stack of a thread; a sign of too little memory only where the address space is limited (ulimit -v).
THREAD_WORDS = ("resource temporarily unavailable", "can't start new thread", "pthread_create")
# XLA reports an attempt that failed and goes on without it.
HARMLESS = "not a failure"


def is_out_of_memory(text: str) -> bool:
    """Returns whether a line of a message says that memory ran out."""
    is_limited = resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
    wanted = WORDS + (THREAD_WORDS if is_limited else ())
    lines = [line for line in text.lower().splitlines() if HARMLESS not in line]
    return any(words in line for line in lines for words in wanted)
