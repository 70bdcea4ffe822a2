"""Downloads against a server on the loopback interface: resumed, verified, atomic, and clear when they fail."""

import hashlib
import http.server
import socket
import tarfile
import threading

import numpy as np
import pytest

from jepa_jax.base.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_USER_ERROR, UserError
from jepa_jax.cli import prepare_data
from jepa_jax.data.download import RemoteFile, download
from jepa_jax.data.readers import cifar

CONTENT = np.random.default_rng(0).bytes(1_000_003)


class Server(http.server.ThreadingHTTPServer):
    """Serves `content`; can ignore ranges, break off after some bytes or answer with an error."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.content, self.ranges, self.break_after, self.status = CONTENT, True, None, None
        self.requested: list[str | None] = []

    def file(self, content=CONTENT, name="data.tar.gz"):
        url = f"http://127.0.0.1:{self.server_port}/{name}"
        return RemoteFile(url, len(content), hashlib.md5(content).hexdigest())


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        server = self.server
        asked = self.headers.get("Range")
        server.requested.append(asked)
        if server.status:
            return self.send_error(server.status)
        start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked and server.ranges else 0
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(server.content) - start))
        self.end_headers()
        stop = server.break_after or len(server.content)
        self.wfile.write(server.content[start:stop])

    def log_message(self, *args):
        pass


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")  # a proxy of this machine knows nothing of its loopback interface
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_downloads_once_and_reports_progress(server, tmp_path):
    seen = []
    directory = tmp_path / "new" / "folder"
    target = download(server.file(), directory, lambda done, total: seen.append((done, total)))
    assert target == directory / "data.tar.gz" and target.read_bytes() == CONTENT
    assert seen[0] == (0, len(CONTENT)) and seen[-1] == (len(CONTENT), len(CONTENT)) and seen == sorted(seen)
    assert download(server.file(), directory) == target
    assert server.requested == [None]  # the second call asked for nothing
    assert [file.name for file in directory.iterdir()] == ["data.tar.gz"]


@pytest.mark.parametrize("ranges", [True, False])
def test_interrupted_download_is_completed_by_the_next(server, tmp_path, ranges):
    server.break_after = 400_000
    with pytest.raises(UserError, match="ended after 400,000 of 1,000,003 bytes; run the same command again"):
        download(server.file(), tmp_path)
    assert not (tmp_path / "data.tar.gz").exists()
    assert (tmp_path / "data.tar.gz.part").read_bytes() == CONTENT[:400_000]
    server.break_after, server.ranges = None, ranges
    seen = []
    target = download(server.file(), tmp_path, lambda done, total: seen.append(done))
    assert target.read_bytes() == CONTENT
    assert server.requested == [None, "bytes=400000-"]
    assert seen[0] == (400_000 if ranges else 0)
    assert [file.name for file in tmp_path.iterdir()] == ["data.tar.gz"]


def test_ctrl_c_keeps_what_was_received(server, tmp_path):
    def interrupt(done, total):
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        download(server.file(), tmp_path, interrupt)
    part = tmp_path / "data.tar.gz.part"
    assert 0 < part.stat().st_size < len(CONTENT) or part.read_bytes() == CONTENT
    assert download(server.file(), tmp_path).read_bytes() == CONTENT


@pytest.mark.parametrize("wrong", [CONTENT[:-1] + b"?", CONTENT + b"more"])
def test_wrong_content_is_deleted(server, tmp_path, wrong):
    server.content = wrong
    with pytest.raises(UserError, match="not the official file .* and was deleted"):
        download(server.file(), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_part_does_not_survive(server, tmp_path):
    (tmp_path / "data.tar.gz.part").write_bytes(b"x" * 1000)
    with pytest.raises(UserError, match="was deleted; try again"):
        download(server.file(), tmp_path)
    assert download(server.file(), tmp_path).read_bytes() == CONTENT
    assert server.requested == ["bytes=1000-", None]


def test_a_complete_part_needs_no_network(server, tmp_path):
    (tmp_path / "data.tar.gz.part").write_bytes(CONTENT)
    assert download(server.file(), tmp_path).read_bytes() == CONTENT
    assert server.requested == []


def test_another_file_under_the_name_is_left_alone(server, tmp_path):
    (tmp_path / "data.tar.gz").write_bytes(b"mine")
    with pytest.raises(UserError, match="exists but is not the official file"):
        download(server.file(), tmp_path)
    assert (tmp_path / "data.tar.gz").read_bytes() == b"mine"


def test_no_server_and_server_errors_say_where_to_put_the_file(server, tmp_path):
    server.status = 404
    with pytest.raises(UserError, match="cannot be downloaded .Not Found.; fetch .* and put it at .*data.tar.gz"):
        download(server.file(), tmp_path)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # bound but not listening: connections are refused
        nobody = RemoteFile(f"http://127.0.0.1:{free.getsockname()[1]}/data.tar.gz", 10, "0" * 32)
        with pytest.raises(UserError, match="cannot be downloaded .*refused.* put it at"):
            download(nobody, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_unwritable_folder(server, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written .*choose another --dir"):
        download(server.file(), tmp_path / "file" / "below")


def test_prepare_data_names_the_official_archive():
    official = prepare_data.REMOTE_ARCHIVES["cifar10"]
    assert official.url == "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
    assert (official.size, official.md5) == (170_052_171, "c32a1d4ab5d03f1284b67883e8d87530")


def test_prepare_data_ends_with_the_flags_to_use(server, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(cifar, "IMAGES_PER_FILE", 2)
    files = tmp_path / "cifar-10-batches-bin"
    files.mkdir()
    for name in cifar.BINARY["train"] + cifar.BINARY["test"]:
        (files / name).write_bytes(bytes(2 * cifar.RECORD))
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as tar:
        tar.add(files, arcname=files.name)
    server.content = (tmp_path / "a.tar.gz").read_bytes()
    remote = server.file(server.content, "cifar-10-binary.tar.gz")
    monkeypatch.setitem(prepare_data.REMOTE_ARCHIVES, "cifar10", remote)
    command = ["cifar10", f"--dir={tmp_path / 'd'}"]

    server.status = 500
    assert prepare_data.PREPARE_DATA.main(command) == EXIT_USER_ERROR
    assert f"put it at {tmp_path / 'd' / 'cifar-10-binary.tar.gz'}" in capsys.readouterr().err
    server.status = None
    for _ in range(2):
        assert prepare_data.PREPARE_DATA.main(command) == EXIT_OK
        words = capsys.readouterr().err  # standard output has the JSON, as it is no terminal
        assert "10 train and 2 test images" in words
        assert f"--config.data.source=cifar10 --config.data.dir={tmp_path / 'd'}" in words
    assert len(server.requested) == 2

    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(prepare_data, "download", interrupt)
    assert prepare_data.PREPARE_DATA.main(command) == EXIT_INTERRUPTED


def test_prepare_data_lists_known_names(capsys):
    assert prepare_data.PREPARE_DATA.main(["imagenet", "--dir=x"]) == EXIT_USER_ERROR
    assert "cifar10" in capsys.readouterr().err
