"""Programs as processes: nothing of them is left, their logs end, and no process of others is touched."""

import json
import os
import subprocess
import sys

import psutil
import pytest

from jepa_jax.base import processes
from jepa_jax.base.errors import UserError

DAEMON = """
import pathlib, subprocess, sys
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
pathlib.Path(sys.argv[1]).write_text(str(child.pid))
"""


def test_a_child_in_a_session_of_its_own_ends_with_the_run(tmp_path):
    ended = processes.run([sys.executable, "-S", "-c", DAEMON, str(tmp_path / "child")], tmp_path / "run", grace=1.0)
    assert ended.exit_code == 0
    child = int((tmp_path / "child").read_text())
    assert not psutil.pid_exists(child) or processes.is_gone(psutil.Process(child))


def test_of_a_log_without_end_the_end_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "LOG_BYTES", 100_000)
    monkeypatch.setattr(processes, "KEPT_BYTES", 1_000)
    code = "for i in range(40):\n  print('x' * 10_000)\nprint('error: the end')"
    for _ in range(2):  # the second time after the log of an earlier attempt
        ended = processes.run([sys.executable, "-S", "-c", code], tmp_path, grace=1.0)
        assert ended.message == "the end"
        log = (tmp_path / processes.LOG).read_bytes()
        assert len(log) < 2_000 and log.startswith(b"[") and b"bytes were dropped here]" in log


def test_writers_go_on_behind_the_end_of_a_log_that_was_shortened(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "LOG_BYTES", 100)
    monkeypatch.setattr(processes, "KEPT_BYTES", 10)
    with open(tmp_path / "log", "ab", buffering=0) as writer:
        writer.write(b"x" * 200)
        assert processes.shorten(tmp_path / "log", 150) == 0
        writer.write(b"end")
    assert (tmp_path / "log").read_bytes() == b"[190 bytes were dropped here]\n" + b"x" * 10 + b"end"
    assert processes.shorten(tmp_path / "log", 7) == 7


@pytest.fixture
def stranger():
    process = subprocess.Popen(["sleep", "600"])
    yield psutil.Process(process.pid)
    process.kill()
    process.wait()


def test_no_file_in_a_folder_makes_a_process_of_others_a_member_of_its_runs(tmp_path, stranger):
    (tmp_path / "a").mkdir()
    record = {"pid": stranger.pid, "created": stranger.create_time(), "command": stranger.cmdline()}
    (tmp_path / "a" / "process.json").write_text(json.dumps(record))
    assert not processes.members(tmp_path, below=True)
    processes.stop_all(processes.members(tmp_path, below=True), grace=1.0)
    assert stranger.is_running() and stranger.status() != psutil.STATUS_ZOMBIE


def test_members_are_those_of_one_folder_or_of_the_folders_in_it(tmp_path):
    environment = os.environ | {processes.RUN_VARIABLE: os.pathsep.join(["/elsewhere", str(tmp_path / "a")])}
    process = subprocess.Popen(["sleep", "600"], env=environment)
    try:
        assert [member.pid for member in processes.members(tmp_path / "a")] == [process.pid]
        assert [member.pid for member in processes.members(tmp_path, below=True)] == [process.pid]
        assert not processes.members(tmp_path) and not processes.members(tmp_path / "a", below=True)
        processes.stop_all(processes.members(tmp_path, below=True), grace=5.0)
        assert process.wait(5) == -15
    finally:
        process.kill()
        process.wait()


def test_a_folder_stays_locked_when_its_lock_file_is_removed(tmp_path):
    with processes.only_one(tmp_path / ".lock", "taken"):
        (tmp_path / ".lock").unlink()
        with pytest.raises(UserError, match="taken"), processes.only_one(tmp_path / ".lock", "taken"):
            pass
    with processes.only_one(tmp_path / ".lock", "taken"):
        pass
