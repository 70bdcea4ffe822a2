"""Processes that belong together end together, with one exit code."""

import os
import signal
import subprocess
import sys

import pytest

from jepa_jax.base.companions import run_companions
from jepa_jax.base.errors import EXIT_PROCESS_LOST

ENDS = "import os, sys, time; time.sleep(float(os.environ['AFTER'])); sys.exit(int(os.environ['CODE']))"
KILLED = "import os, sys; os.environ['CODE'] == 'kill' and os.kill(os.getpid(), 9); sys.exit(int(os.environ['CODE']))"
SLEEPS = (
    "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(143)); print('up', flush=True); time.sleep(600)"
)


def python(program, *environments, grace=600.0):
    return run_companions([sys.executable, "-c", program], environments, grace=grace)


@pytest.mark.parametrize("codes, expected", [("00", 0), ("02", 2), ("20", 2), ("35", 5), ("53", EXIT_PROCESS_LOST)])
def test_the_common_exit_code_does_not_depend_on_who_ends_first(codes, expected):
    assert python(ENDS, *({"AFTER": "0", "CODE": code} for code in codes)) == expected


@pytest.mark.parametrize("order", [("kill", "5"), ("5", "kill")])
def test_a_killed_process_counts_as_lost_when_another_says_so(order):
    assert python(KILLED, *({"CODE": code} for code in order)) == EXIT_PROCESS_LOST


def test_when_one_fails_the_others_are_ended_after_a_grace_time():
    assert python(ENDS, {"AFTER": "3600", "CODE": "0"}, {"AFTER": "0", "CODE": "3"}, grace=0.5) == 3


def test_a_signal_reaches_all_of_them():
    program = (
        "import sys; from jepa_jax.base.companions import run_companions\n"
        "sys.exit(run_companions([sys.executable, '-c', sys.argv[1]], [{}, {}], grace=600.0))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, SLEEPS], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "up\n" and process.stderr.readline() == "[1] up\n"
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(timeout=600) == 143
