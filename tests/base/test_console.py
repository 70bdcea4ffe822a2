"""Writing for people ends nothing: full disks, closed streams, readers that have gone."""

import errno
import io
import os
import subprocess
import sys

import pytest

from jepa_jax.base.console import Console, TolerantStream


class FullDisk(io.StringIO):
    """Has room for so many characters."""

    room = 0

    def write(self, text: str) -> int:
        if len(text) > self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.room -= len(text)
        return super().write(text)


def test_lines_that_find_no_room_are_dropped_and_said_when_there_is_room_again():
    disk = FullDisk()
    console = Console(disk)
    console.line("lost")
    console.warn("lost")
    disk.room = 1000
    console.line("kept")
    console.line("kept too")
    assert disk.getvalue() == "warning: text was dropped here (the disk is full)\nkept\nkept too\n"


def test_closed_streams_drop_everything():
    closed = io.StringIO()
    closed.close()
    for stream in (None, closed):
        console = Console(TolerantStream(stream))
        console.start("train", 3)
        console.line("lost")
        console.stop()


PROGRAM = """
import os, sys
from jepa_jax.base.console import tolerant_standard_error
from jepa_jax.cli.command import Command, Result
from jepa_jax.cli.main import main

def run(arguments, console):
    for _ in range(3):
        console.line("x" * 30000)
        sys.stderr.write("y" * 30000)
    with open(os.environ["REPORT"], "w") as file:
        file.write("done" if file.fileno() > 2 else "the file is a standard stream")
    return Result([{"z": "z" * 100000}], "text", 7)

with tolerant_standard_error():
    code = Command("test", "Tests.", lambda parser: None, run).main([])
sys.exit(code)
"""


@pytest.mark.parametrize(
    ("streams", "code"),
    [
        ("2>/dev/full", 7),
        ("2>&1 | head -c 5; exit ${PIPESTATUS[0]}", 7),
        ("| head -c 5; exit ${PIPESTATUS[0]}", 7),
        ("2>&-", 7),
        (">&-", 7),
        (">&- 2>&- <&-", 7),
        (">/dev/full", 2),  # the result is lost
    ],
)
def test_a_command_ends_as_it_would_whatever_its_streams_are(tmp_path, streams, code):
    command = ["bash", "-c", f'"$0" -c "$1" {streams}', sys.executable, PROGRAM]
    report = tmp_path / "report"
    ended = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"REPORT": str(report)})
    assert (ended.returncode, report.read_text()) == (code, "done"), ended.stderr[-1000:]
    assert "Traceback" not in ended.stderr and "Exception ignored" not in ended.stderr
    if code == 2:
        assert "error: standard output: cannot be written (the disk is full)" in ended.stderr
