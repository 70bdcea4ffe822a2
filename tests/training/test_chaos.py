"""A short storm: profiling/chaos.py in full is for hands and for the slow part of CI."""

import json
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]


def storm(*flags: str) -> dict:
    command = [sys.executable, "profiling/chaos.py", "--end_seconds=900", *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=7200)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_signals_a_foreign_checkpoint_and_damaged_programs_change_no_parameters_and_leave_nothing():
    result = storm("--kills=2", "--processes=1", "--workers=2", "--seed=2", "--cases=foreign,damaged")
    assert (result["kills"], result["equal"], result["leftovers"]) == (2, True, 0)
    assert result["cases"] == {"foreign checkpoint": True, "damaged programs": True} and not result["problems"]


@pytest.mark.slow
def test_two_processes_that_are_hit_by_signals_end_with_the_same_parameters_and_leave_nothing():
    result = storm("--kills=2", "--processes=2", "--workers=0", "--seed=3", "--cases=none")
    assert (result["kills"], result["equal"], result["leftovers"]) == (2, True, 0)
