"""Does a message say that memory ran out? One list of words for trials, their logs and training."""

# What malloc, XLA, CUDA, cuDNN, LLVM, Python and the loader of libraries say; in lower case.
WORDS = (
    "resource_exhausted", "out of memory", "error_out_of_memory", "status_alloc_failed", "bad_alloc", "memoryerror",
    "cannot allocate memory", "unable to allocate", "failed to allocate", "failed to map segment",
    "memory allocation",
)  # fmt: skip
# No room for the stack of a thread.
THREAD_WORDS = ("resource temporarily unavailable", "can't start new thread", "pthread_create")
# XLA tells of an attempt that it goes on without.
HARMLESS = "not a failure"


def is_out_of_memory(text: str, limited: bool = False) -> bool:
    """Whether a line of a message says so; with limited address space a thread that cannot start does too."""
    wanted = WORDS + (THREAD_WORDS if limited else ())
    lines = [line for line in text.lower().splitlines() if HARMLESS not in line]
    return any(words in line for line in lines for words in wanted)
