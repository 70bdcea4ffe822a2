"""Several processes save together: where one of them cannot, all know, none waits, and the next save succeeds."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

from jepa_jax.base.companions import local_address
from tests.flags import FAST_TO_COMPILE

ROOT = pathlib.Path(__file__).parents[2]


def run_two(script: str, folder: pathlib.Path) -> list[str]:
    """Runs a script in two processes to their end; returns what each of them said."""
    environment = os.environ | {"JAX_NUM_PROCESSES": "2", "XLA_FLAGS": FAST_TO_COMPILE, "COLUMNS": "1000"}
    command = [sys.executable, script, str(folder)]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    started = []
    with local_address() as address:
        try:
            for index in range(2):
                place = environment | {"JAX_COORDINATOR_ADDRESS": address, "JAX_PROCESS_ID": str(index)}
                started.append(subprocess.Popen(command, cwd=ROOT, env=place, text=True, **pipes))
            said = [process.communicate(timeout=900)[0] for process in started]  # Orbax would wait for 1200 s
        finally:
            for process in started:
                process.kill()
    assert [process.returncode for process in started] == [0, 0], said
    return said


@pytest.mark.slow
def test_a_save_that_fails_on_one_process_fails_on_all_and_the_next_succeeds(tmp_path):
    for text in run_two("tests/program/run_saves.py", tmp_path):
        figures = re.findall(r"^\d: (\d) (\d) (\d)$", text, re.MULTILINE)
        # Whole on disk, newest that the process knows of, and warnings.
        assert figures == [tuple(row) for row in ("110", "110", "331", "331", "552", "552", "773")], text
        for step, reason in ((2, "the disk is full"), (4, "the file would be larger"), (6, "Input/output error")):
            assert f"step_{step}: could not be saved ({reason}" in text, text
        assert "skipped: ['both', 'of 0', 'of 1']" in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_5", "step_7"]


@pytest.mark.slow
def test_a_training_of_two_processes_goes_on_after_a_save_that_failed(tmp_path):
    said = run_two("tests/training/run_failed_save.py", tmp_path)
    assert "step_3: could not be saved (the disk is full); training goes on" in said[0]
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "finished"
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_12"]
