"""Several processes save together: where one of them cannot, all know, none waits, and the next save succeeds."""

import os
import pathlib
import re
import socket
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]


def test_a_save_that_fails_on_one_process_fails_on_all_and_the_next_succeeds(tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    environment = os.environ | {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2", "XLA_FLAGS": ""}
    command = [sys.executable, "tests/program/run_saves.py", str(tmp_path / "checkpoints")]
    processes = []
    try:
        for index in range(2):
            place = environment | {"JAX_PROCESS_ID": str(index)}
            processes.append(
                subprocess.Popen(command, cwd=ROOT, env=place, stdout=-1, stderr=subprocess.STDOUT, text=True)
            )
        said = [process.communicate(timeout=240)[0] for process in processes]  # Orbax would wait for 1200 s
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], said
    for text in said:  # whole on disk, newest as the process knows, warnings
        figures = re.findall(r"^\d: (\d) (\d) (\d)$", text, re.MULTILINE)
        assert figures == [tuple(row) for row in ("110", "110", "331", "331", "552", "552", "773")], text
        for step, reason in ((2, "the disk is full"), (4, "the file would be larger"), (6, "Input/output error")):
            assert f"step_{step}: could not be saved ({reason}" in text, text
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step_5", "step_7"]
