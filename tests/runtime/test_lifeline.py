"""How processes meet, who is let in, and how one ends when another does."""

import concurrent.futures
import contextlib
import json
import os
import socket
import subprocess
import sys

import pytest

from jepa_jax.base.companions import local_address
from jepa_jax.base.errors import EXIT_PROCESS_LOST, UserError
from jepa_jax.runtime import lifeline
from jepa_jax.runtime.places import Place

# Process 1, connected to the test as to process 0; it waits for its end, fails, perhaps twice, or leaves in good order.
PEER = """
import atexit, ctypes, os, socket, sys, time
from unittest import mock
sys.modules |= {"jax": mock.MagicMock(), "jax.experimental": mock.MagicMock()}  # not needed here, and slow to import
from jepa_jax.base.errors import UserError
from jepa_jax.runtime import lifeline, peers
lifeline.BEAT_SECONDS = float(os.environ.get("BEAT", 5))
lifeline.OWN_END_SECONDS = float(os.environ.get("OWN_END", 5))
peers._lifeline = lifeline.Lifeline(1, {0: socket.create_connection(("127.0.0.1", int(sys.argv[1])))})
atexit.register(peers._lifeline.at_exit)
print("up", flush=True)
for what in sys.argv[2:]:
    if what == "wait":
        time.sleep(600)
    if what == "abort":
        peers.delay_abort()
        ctypes.CDLL(None).abort()
    try:
        with peers.fail_all(KeyError):
            raise {
                "user": UserError("no such file"), "agreed": KeyError(), "bug": ZeroDivisionError("oops"),
                "ctrl-c": KeyboardInterrupt(),
            }[what]
    except BaseException as error:
        code = getattr(error, "exit_code", 1)
sys.exit(code)
"""


class Peer:
    def __init__(self, *what, **environment):
        with socket.create_server(("127.0.0.1", 0)) as server:
            environment = os.environ | environment
            command = [sys.executable, "-c", PEER, str(server.getsockname()[1]), *what]
            pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            self.process = subprocess.Popen(command, text=True, env=environment, **pipes)
            self.connection, _ = server.accept()
        assert self.process.stdout.readline() == "up\n"

    def end(self):
        _, errors = self.process.communicate(timeout=1200)
        return self.process.returncode, errors

    def said(self):
        return json.loads(next(filter(str.strip, self.connection.makefile())))


def test_a_process_ends_with_a_message_when_another_is_gone():
    peer = Peer("wait")
    peer.connection.close()
    code, errors = peer.end()
    assert code == EXIT_PROCESS_LOST and "error: process 0 is gone" in errors and "same command again" in errors


def test_a_process_that_jax_aborts_ends_with_a_message_and_a_code_of_its_own():
    peer = Peer("abort")
    peer.connection.close()
    code, errors = peer.end()
    assert code == EXIT_PROCESS_LOST and "error: process 0 is gone" in errors


def test_a_process_ends_with_the_code_and_the_words_of_one_that_failed():
    peer = Peer("wait", OWN_END="0.1")
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


def test_a_process_that_hangs_is_named_and_a_message_with_code_0_is_no_success():
    silent, lying = Peer("wait", BEAT="0.02"), Peer("wait", OWN_END="0.1")
    lying.connection.sendall(json.dumps({"process": 0, "why": "is gone: all is well", "code": 0}).encode() + b"\n")
    code, errors = silent.end()
    assert code == EXIT_PROCESS_LOST and "error: process 0 has not answered for" in errors and "again" in errors
    assert lying.end()[0] == EXIT_PROCESS_LOST


class Scripted:
    """A connection on which given things happen one after the other: bytes come, or none in time."""

    def __init__(self, *happens):
        self.happens = list(happens)

    def settimeout(self, seconds):
        pass

    def recv(self, size):
        what = self.happens.pop(0)
        if what is None:
            raise TimeoutError
        return what


def test_beats_keep_a_process_alive():
    nearly_silent = [None] * (lifeline.SILENT_BEATS - 1)
    lines = lifeline._lines(Scripted(*nearly_silent, b"\n", *nearly_silent, b"\n", *nearly_silent, None))
    assert [next(lines), next(lines)] == [b"", b""]
    with pytest.raises(TimeoutError):
        next(lines)


@contextlib.contextmanager
def meeting(monkeypatch, *places, patience=600.0):
    """Lets processes meet, as threads; yields what became of each of them, in order."""
    monkeypatch.setattr(lifeline, "CONNECT_SECONDS", patience)
    monkeypatch.setattr(lifeline, "Lifeline", lambda index, connections: connections)  # no end of this process
    with concurrent.futures.ThreadPoolExecutor(len(places)) as pool:
        yield [pool.submit(lifeline.meet, place) for place in places]


def outcome(future):
    error = future.exception()
    assert error is None or isinstance(error, UserError), error
    return str(error) if error else sorted(future.result())


def test_processes_meet_at_the_address_alone_and_leave_the_port_free(monkeypatch):
    with local_address() as address:
        places = [Place(address, 3, index, token="secret") for index in range(3)]
        with meeting(monkeypatch, *places) as ends:
            assert [outcome(end) for end in ends] == [[1, 2], [0], [0]]
        assert ends[0].result()[1].getsockname()[0] == "127.0.0.1"  # not every address of this machine
        with contextlib.closing(lifeline._listen(places[0])) as server:
            assert server.getsockname()[0] == "127.0.0.1"


def test_strangers_are_refused_and_the_run_starts_without_them(monkeypatch):
    with local_address() as address:
        place = Place(address, 2, 0, token="secret")
        strangers = [Place(address, 2, 1, token="guess"), Place(address, 3, 1, token="secret"), Place(address, 2, 1)]
        with meeting(monkeypatch, place, *strangers) as ends:
            assert all("another run" in outcome(end) for end in ends[1:])
            for garbage in (b"\x16\x03\x01 hello", b"[]\n", b'{"process": true, "count": 2, "token": 1}\n', b""):
                with socket.create_connection((place.host, place.port)) as connection:
                    connection.sendall(garbage)
            assert not ends[0].done()
            assert sorted(lifeline.meet(Place(address, 2, 1, token="secret"))) == [0]
        assert outcome(ends[0]) == [1]


def test_two_processes_with_one_number_end_the_start_for_all(monkeypatch):
    with local_address() as address:
        places = [Place(address, 3, index) for index in (0, 1, 1)]
        with meeting(monkeypatch, *places) as ends:
            assert all("two processes say that they are number 1 of 3" in outcome(end) for end in ends)


def test_what_does_not_come_and_a_port_that_is_taken_are_named(monkeypatch):
    with local_address() as address, meeting(monkeypatch, Place(address, 3, 0), patience=0.2) as ends:
        assert f"process 1, 2 of 3 did not come to {address}" in outcome(ends[0])
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setattr(lifeline, "ANSWER_SECONDS", 0.2)
        with meeting(monkeypatch, Place(address, 2, 0), Place(address, 2, 1)) as ends:
            assert "process 0 cannot listen there (Address already in use)" in outcome(ends[0])
            assert "is not process 0 of a run" in outcome(ends[1])


def test_a_second_ctrl_c_ends_all_processes_with_its_own_code():
    peer = Peer("ctrl-c")
    assert peer.said()["code"] == 130
    assert peer.end()[0] == 130
