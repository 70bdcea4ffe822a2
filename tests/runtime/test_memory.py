"""Memory of the process: messages that mean it ran out, its peak, and the share that JAX takes of a GPU."""

import mmap
import resource

import pytest

from jepa_jax.base.errors import UserError
from jepa_jax.runtime import memory
from jepa_jax.runtime.allocator import pool_fraction, prepare_allocators
from jepa_jax.runtime.memory import free_bytes, is_out_of_memory, peak_bytes, pool_doubt, reset_peak

MB = 2**20


@pytest.mark.parametrize(
    "message",
    [
        "CUDA_ERROR_OUT_OF_MEMORY",
        "INTERNAL: CUDNN_STATUS_ALLOC_FAILED",
        "Failed to allocate 8.00GiB",
        "FAILED_PRECONDITION: DNN library initialization failed. Look at the errors above for more details.",
        "E0000 cuda_dnn.cc:534] Could not create cudnn handle: CUDNN_STATUS_NOT_INITIALIZED",
        "E0000 cuda_blas.cc:180] failed to create cublas handle: the resource allocation failed",
        "INTERNAL: CUBLAS_STATUS_NOT_INITIALIZED",
        "INTERNAL: CUBLAS_STATUS_ALLOC_FAILED",
        "INTERNAL: NCCL operation ncclGroupEnd() failed: unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
        "host:1:2 [0] NCCL WARN Failed to CUDA calloc 4194304 bytes",
        "a line\nRESOURCE_EXHAUSTED: Out of memory while trying to allocate",
        MemoryError(),
        RuntimeError("RESOURCE_EXHAUSTED: Out of memory"),
    ],
)
def test_messages_of_every_library_are_known(message):
    assert is_out_of_memory(message)


def test_other_errors_and_attempts_that_failed_harmlessly_do_not_count():
    attempted = "ran out of memory trying to allocate 2GiB. The caller indicates that this is not a failure"
    assert not is_out_of_memory(attempted) and is_out_of_memory(f"{attempted}\nRESOURCE_EXHAUSTED")
    kernel = "RESOURCE_EXHAUSTED: Shared memory size limit exceeded: requested 114944, available 101376"
    assert not is_out_of_memory(kernel)
    assert not is_out_of_memory(RuntimeError("INTERNAL: something else"))


def test_a_thread_without_room_counts_only_where_memory_is_limited(monkeypatch):
    message = "Thread x creation via pthread_create() failed."
    for limit, counts in ((resource.RLIM_INFINITY, False), (2**40, True)):
        monkeypatch.setattr(resource, "getrlimit", lambda which, limit=limit: (limit, resource.RLIM_INFINITY))
        assert is_out_of_memory(message) is counts


def test_the_peak_of_the_process_can_be_reset():
    with mmap.mmap(-1, 200 * MB) as large:
        large.write(b"x" * (200 * MB))
        before = peak_bytes()
    if not reset_peak():
        pytest.skip("this kernel does not reset the peak")
    assert peak_bytes() < before - 150 * MB


def test_the_share_of_the_pool_is_read_from_the_environment():
    assert pool_fraction({}) == 0.9
    assert pool_fraction({"XLA_CLIENT_MEM_FRACTION": ".9"}) == 0.9
    assert pool_fraction({"XLA_PYTHON_CLIENT_MEM_FRACTION": ".5"}) == 0.5
    with pytest.raises(UserError, match="XLA_CLIENT_MEM_FRACTION = much"):
        pool_fraction({"XLA_CLIENT_MEM_FRACTION": "much"})


@pytest.mark.parametrize(
    "given, found",
    [
        ({}, {"XLA_CLIENT_MEM_FRACTION": "0.9"}),
        ({"XLA_CLIENT_MEM_FRACTION": ".5"}, {"XLA_CLIENT_MEM_FRACTION": "0.5"}),
        ({"XLA_PYTHON_CLIENT_MEM_FRACTION": ".5"}, {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5"}),
    ],
)
def test_runs_set_the_share_unless_a_variable_names_one(given, found):
    prepare_allocators(given)
    assert given == found


def test_a_program_is_doubted_that_needs_more_than_the_pool():
    class Device:
        device_kind = "NVIDIA L4"

        def memory_stats(self):
            return {"bytes_limit": 100 * MB}

    assert pool_doubt(100 * MB, Device()) == ""
    assert "NVIDIA L4: the step needs 0.20 GiB of the 0.10 GiB that JAX takes" in pool_doubt(200 * MB, Device())
    Device.memory_stats = lambda self: None  # a CPU
    assert pool_doubt(200 * MB, Device()) == ""


@pytest.mark.parametrize("limited, free", [("job", 35), ("job/task", 35), ("other", None), (".", 35)])
def test_free_memory_is_that_of_the_tightest_group_without_what_files_occupy(tmp_path, monkeypatch, limited, free):
    for name in ("job/task", "other"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "job" / "memory.max").write_text("max\n")
    figures = {
        "memory.max": "100\n",
        "memory.current": "80\n",
        "memory.stat": "anon 65\ninactive_file 10\nactive_file 5\n",
    }
    for name, text in figures.items():
        (tmp_path / limited / name).write_text(text)
    (tmp_path / "group").write_text("4:memory:/old\n0::/job/task\n")
    monkeypatch.setattr(memory, "_GROUPS", tmp_path)
    monkeypatch.setattr(memory, "_GROUP", tmp_path / "group")
    assert free_bytes() == free if free else free_bytes() > MB
