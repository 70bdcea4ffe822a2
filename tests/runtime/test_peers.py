"""How processes find each other, and how one ends when another does."""

import json
import socket
import subprocess
import sys

import pytest

from jepa_jax.base.errors import EXIT_PROCESS_LOST, UserError
from jepa_jax.runtime.peers import _from_variables, _is_slurm_step

# Process 1, connected to the test as to process 0; it waits for its end, fails, perhaps twice, or leaves in good order.
PEER = """
import atexit, socket, sys, time
from jepa_jax.base.errors import UserError
from jepa_jax.runtime import peers
peers._lifeline = peers.Lifeline(1, {0: socket.create_connection(("127.0.0.1", int(sys.argv[1])))})
atexit.register(peers._lifeline.at_exit)
print("up", flush=True)
for what in sys.argv[2:]:
    if what == "wait":
        time.sleep(600)
    try:
        with peers.fail_all(KeyError):
            raise {"user": UserError("no such file"), "agreed": KeyError(), "bug": ZeroDivisionError("oops")}[what]
    except Exception as error:
        code = getattr(error, "exit_code", 1)
sys.exit(code)
"""


class Peer:
    def __init__(self, *what):
        with socket.create_server(("127.0.0.1", 0)) as server:
            command = [sys.executable, "-c", PEER, str(server.getsockname()[1]), *what]
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            self.connection, _ = server.accept()
        assert self.process.stdout.readline() == "up\n"

    def end(self):
        _, errors = self.process.communicate(timeout=1200)
        return self.process.returncode, errors

    def said(self):
        return json.loads(self.connection.makefile().readline())


def test_a_process_ends_with_a_message_when_another_is_gone():
    peer = Peer("wait")
    peer.connection.close()
    code, errors = peer.end()
    assert code == EXIT_PROCESS_LOST and "error: process 0 is gone" in errors and "same command again" in errors


@pytest.mark.slow
def test_a_process_ends_with_the_code_and_the_words_of_one_that_failed():
    peer = Peer("wait")
    peer.connection.sendall(json.dumps({"process": 2, "why": "ended: no such file", "code": 2}).encode() + b"\n")
    code, errors = peer.end()
    assert code == 2 and "error: process 2 ended: no such file" in errors and "again" not in errors


def test_a_process_that_fails_says_why_and_a_second_failure_does_not_hang():
    peer = Peer("user", "user")
    assert peer.said() == {"process": 1, "why": "ended: no such file", "code": 2}
    assert peer.end()[0] == 2


def test_an_error_that_all_raise_is_an_orderly_end():
    peer = Peer("agreed")
    assert peer.said()["why"] == "" and peer.end()[0] == 1


def test_an_unknown_error_is_told_unless_another_process_is_gone():
    peer = Peer("bug")
    peer.connection.close()
    assert peer.end()[0] == EXIT_PROCESS_LOST


def test_places_come_from_variables_and_kubernetes():
    place = {"JAX_COORDINATOR_ADDRESS": "host:1", "JAX_NUM_PROCESSES": "4"}
    assert _from_variables(place | {"JAX_PROCESS_ID": "3"}) == ("host:1", 4, 3)
    assert _from_variables(place | {"JOB_COMPLETION_INDEX": "2"}) == ("host:1", 4, 2)
    with pytest.raises(UserError, match="JAX_PROCESS_ID is not"):
        _from_variables(place)
    for wrong in ({"JAX_PROCESS_ID": "4"}, {"JAX_PROCESS_ID": "x"}, {"JAX_PROCESS_ID": "0", "JAX_NUM_PROCESSES": ""}):
        with pytest.raises(UserError, match="need HOST:PORT"):
            _from_variables(place | wrong)


def test_only_a_step_of_several_tasks_is_slurms():
    step = {"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_STEP_NODELIST": "n[1-2]"}
    assert _is_slurm_step(step)
    assert not _is_slurm_step({}) and not _is_slurm_step(step | {"SLURM_NTASKS": "1"})
    assert not _is_slurm_step({name: step[name] for name in ("SLURM_NTASKS", "SLURM_PROCID")})  # a batch script itself
    with pytest.raises(UserError, match="SLURM_NTASKS = many"):
        _is_slurm_step({"SLURM_NTASKS": "many"})
