"""One of two processes that save together while one of them cannot: run_saves.py FOLDER.

Prints a line for each save: the newest whole checkpoint, that which this process knows of, and the number of warnings.
In the end, the unreadable images that all of them found.
"""

import contextlib
import errno
import os
import pathlib
import resource
import shutil
import signal
import sys
from unittest import mock

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))

import jax
import numpy as np

from jepa_jax.program import checkpoint_writer
from jepa_jax.program.checkpoint import Checkpoints
from jepa_jax.runtime.mesh import batch_sharding, make_mesh, replicated
from jepa_jax.runtime.peers import connect, is_first
from jepa_jax.training.progress import Progress
from tests.program.test_checkpoint import make_state

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)


def no_checksums(folder: pathlib.Path) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def no_disk(folder: pathlib.Path) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


@contextlib.contextmanager
def small_files():
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def fault_at(step: int) -> contextlib.AbstractContextManager[object]:
    if step == 2 and is_first():
        return mock.patch.object(checkpoint_writer, "write_checksums", no_checksums)
    if step == 4 and not is_first():
        return small_files()
    if step == 6 and is_first():
        return mock.patch.object(shutil, "disk_usage", no_disk)
    return contextlib.nullcontext()


def state_of_all(step: int):
    """Returns a state of which each process has a part that is too large for `small_files`."""
    mesh = make_mesh(-1, 1)
    rows = np.random.default_rng(jax.process_index()).normal(size=(1, 50_000)).astype(np.float32)

    def on_all(array, sharding):
        return jax.make_array_from_process_local_data(sharding, np.asarray(array))

    state = jax.tree.map(lambda array: on_all(array, replicated(mesh)), make_state(step=step))
    state.params["noise"] = on_all(rows, batch_sharding(mesh))
    return state


def main() -> None:
    connect(os.environ)
    warnings: list[str] = []
    with Checkpoints(pathlib.Path(sys.argv[1]), keep=2, warn=warnings.append) as checkpoints:
        for step in range(1, 8):
            with fault_at(step):
                checkpoints.save(step, state_of_all(step), {"step": step})
                whole = checkpoints.whole_step()
            print(f"{step}: {whole} {checkpoints.latest_step()} {len(warnings)}")
    print(*warnings, sep="\n")
    progress = Progress(skipped_images=["both", f"of {jax.process_index()}"])
    progress.share_skipped()
    print("skipped:", sorted(progress.skipped_images))


if __name__ == "__main__":
    main()
