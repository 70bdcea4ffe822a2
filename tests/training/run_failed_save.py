"""One of two processes that train together; the first save fails on the first of them: run_failed_save.py FOLDER."""

import errno
import os
import pathlib
import sys
from unittest import mock

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))

from jepa_jax.program import checkpoint_writer
from jepa_jax.program.checksums import write_checksums
from jepa_jax.training.run import train
from tests.tiny import tiny_config


def fail_once(folder: pathlib.Path) -> None:
    if "step_3." in folder.name and os.environ["JAX_PROCESS_ID"] == "0":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    write_checksums(folder)


if __name__ == "__main__":
    with mock.patch.object(checkpoint_writer, "write_checksums", fail_once):
        train(tiny_config(eval__every_epochs=0), pathlib.Path(sys.argv[1]))
