"""A mirror on an S3-compatible server on this machine: a machine that is gone with its disk loses nothing."""

import contextlib
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest

pytest.importorskip("moto")
s3fs = pytest.importorskip("s3fs")

ROOT = pathlib.Path(__file__).parents[2]
URL = "s3://bucket/run"
KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}


def answers(port):
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


@contextlib.contextmanager
def server():
    """Yields the address of an S3 server that keeps objects in memory."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while not answers(port):
            assert process.poll() is None, "the server has ended"
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def start(environment, *arguments):
    command = [sys.executable, "tests/program/run_mirrored.py", *map(str, arguments)]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    return subprocess.Popen(command, cwd=ROOT, env=environment, text=True, **pipes)


@pytest.mark.slow
def test_a_killed_run_whose_workdir_is_gone_continues_from_s3_with_the_same_bits(tmp_path):
    with server() as endpoint:
        environment = os.environ | KEYS | {"AWS_ENDPOINT_URL": endpoint}
        files = s3fs.S3FileSystem(key="test", secret="test", endpoint_url=endpoint)
        files.mkdir("bucket")
        process = start(environment, tmp_path / "run", URL, "epoch 3/6")
        while not files.glob(f"{URL}/checkpoints/step_*/checksums.json"):
            files.invalidate_cache()
            assert process.poll() is None, process.communicate()
            time.sleep(0.1)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        shutil.rmtree(tmp_path / "run")
        resumed, errors = start(environment, tmp_path / "run", URL).communicate(timeout=900)
        assert "fetched checkpoints/step_" in errors and "resumed at step" in errors, errors
        whole, _ = start(environment, tmp_path / "whole").communicate(timeout=900)
        assert resumed == whole != ""

        files.invalidate_cache()
        state = next(path for path in files.find(f"{URL}/checkpoints") if "/d/" in path)
        content = bytearray(files.cat_file(state))
        content[len(content) // 2] ^= 1
        files.pipe_file(state, bytes(content))
        shutil.rmtree(tmp_path / "run")
        _, errors = start(environment, tmp_path / "run", URL).communicate(timeout=900)
        assert "every checkpoint is damaged" in errors, errors
        assert not (tmp_path / "run" / "checkpoints").exists() or not list((tmp_path / "run" / "checkpoints").iterdir())
