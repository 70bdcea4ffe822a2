"""Ctrl-C and SIGTERM as a flag and as an exception."""

import signal
import subprocess
import sys
import threading
import time

import pytest

from jepa_jax.base.signals import Interrupted, InterruptFlag, acknowledged, signals_raise


@pytest.mark.parametrize("signum, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_flag_waits_for_a_check_and_the_second_signal_does_not(signum, code):
    before = signal.getsignal(signum)
    with InterruptFlag() as flag:
        flag.check()
        signal.raise_signal(signum)
        assert flag.raised == signum
        assert signal.getsignal(signum) is before
        with pytest.raises(Interrupted) as stop:
            flag.check()
    assert stop.value.exit_code == code and str(stop.value) == signum.name
    assert signal.getsignal(signum) is before


WHERE_PYTHON_SWALLOWS_EXCEPTIONS = """
import gc, signal, time
from jepa_jax.base.signals import Interrupted, signals_raise

class Finalized:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)

left = []
gc.callbacks.append(lambda phase, info: left and signal.raise_signal(left.pop()))
for place in (Finalized, lambda: left.append(signal.SIGTERM) or gc.collect()):
    try:
        with signals_raise():
            place()
            time.sleep(600)
    except Interrupted as error:
        print(error)
"""


def test_a_signal_in_a_finalizer_or_in_a_callback_of_the_garbage_collector_is_not_lost():
    """In a process of its own: what other tests leave to the collector may swallow the signal too."""
    command = [sys.executable, "-c", WHERE_PYTHON_SWALLOWS_EXCEPTIONS]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "SIGINT\nSIGTERM\n"


@pytest.mark.parametrize("signum, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_waiting_command_gets_an_exception_with_the_exit_code(signum, code):
    before = signal.getsignal(signum)
    with pytest.raises(KeyboardInterrupt) as stop, signals_raise():
        signal.raise_signal(signum)
    assert isinstance(stop.value, Interrupted) and stop.value.exit_code == code
    assert signal.getsignal(signum) is before


def test_a_signal_is_acknowledged_while_the_main_thread_computes():
    said = threading.Event()
    with InterruptFlag() as flag, acknowledged(lambda text: text.startswith("SIGINT: stopping") and said.set()):
        signal.raise_signal(signal.SIGINT)
        assert said.wait(600)
    assert flag.raised == signal.SIGINT and signal.set_wakeup_fd(-1) == -1


def test_a_block_without_a_signal_says_nothing():
    with acknowledged(pytest.fail):
        pass


def test_outside_the_main_thread_nothing_is_caught():
    handlers = []

    def work():
        with InterruptFlag(), signals_raise():
            handlers.append(signal.getsignal(signal.SIGTERM))

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert handlers == [before]


@pytest.mark.parametrize("signum, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_while_modules_are_imported_ends_the_process_even_where_exceptions_are_swallowed(signum, code):
    program = (
        "import os, sys; from jepa_jax.base.signals import signals_exit\n"
        "with signals_exit():\n"
        "    try:\n        os.kill(os.getpid(), int(sys.argv[1]))\n    except BaseException:\n        pass\n"
    )
    assert subprocess.run([sys.executable, "-c", program, str(int(signum))]).returncode == code


ENDING = """
import atexit, os, sys, time
from jepa_jax.base.signals import leave

def end():
    print("ending", flush=True)
    time.sleep(float(sys.argv[1]))

atexit.register(end)
leave(7)
"""


@pytest.mark.parametrize("signals, code", [(1, 7), (2, -signal.SIGINT)])
def test_a_program_whose_work_is_done_ends_as_it_would_and_a_second_ctrl_c_kills_it(signals, code):
    command = [sys.executable, "-c", ENDING, "0.3" if code == 7 else "600"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ending\n"
    while process.poll() is None:
        process.send_signal(signal.SIGINT)
        if signals == 1:
            break
        time.sleep(0.05)
    _, errors = process.communicate(timeout=1200)
    assert (process.returncode, errors) == (code, "")
