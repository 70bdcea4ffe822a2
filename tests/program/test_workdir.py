"""The folder of a run: what it refuses, and that refusing leaves nothing behind."""

import json

import pytest

from jepa_jax.base.errors import UserError
from jepa_jax.config.schema import flatten, nested
from jepa_jax.program.workdir import Workdir
from tests.tiny import tiny_config

CONFIG = tiny_config(optim__lr=0.1).to_dict()


@pytest.fixture
def finished(tmp_path):
    folder = Workdir(tmp_path / "run")
    folder.create()
    folder.config.write_text(json.dumps(CONFIG))
    folder.summary.write_text(json.dumps({"status": "finished"}))
    return folder


def test_a_check_creates_nothing(tmp_path):
    folder = Workdir(tmp_path / "a" / "b")
    folder.check(CONFIG, "auto")
    assert list(tmp_path.iterdir()) == []
    folder.create()
    assert folder.path.is_dir() and folder.read_summary() is None


@pytest.mark.parametrize("resume, message", [("must", "no checkpoint to resume from"), ("perhaps", "--resume=perhaps")])
def test_a_refused_run_leaves_no_folder(tmp_path, resume, message):
    with pytest.raises(UserError, match=message):
        Workdir(tmp_path / "run").check(CONFIG, resume)
    assert list(tmp_path.iterdir()) == []


def test_a_path_that_cannot_be_a_folder_is_refused_before_it_is_created(tmp_path):
    (tmp_path / "file").write_text("")
    for path in ("file", "file/run"):
        with pytest.raises(UserError, match="cannot be written"):
            Workdir(tmp_path / path).check(CONFIG, "auto")
        with pytest.raises(UserError, match="cannot write"):
            Workdir(tmp_path / path).create()


def test_another_config_is_refused_unless_it_changes_nothing_that_matters(finished):
    finished.check(tiny_config(optim__lr=0.1, log__every_steps=9).to_dict(), "auto")
    with pytest.raises(UserError, match=r"another config.*\n  config\.optim\.lr: 0\.1 -> 0\.2"):
        finished.check(tiny_config(optim__lr=0.2).to_dict(), "auto")
    with pytest.raises(UserError, match="holds a run already"):
        finished.check(CONFIG, "never")


def test_a_run_of_an_earlier_version_is_recognised(finished):
    """Its config.json has keys that are no longer there, and lacks others."""
    old = flatten(CONFIG) | {"optim.nesterov": False, "method.temperature": 0.2}
    del old["data.channels"]
    finished.config.write_text(json.dumps(nested(old)))
    finished.check(CONFIG, "auto")


def test_a_damaged_file_is_named(finished):
    finished.summary.write_text("{")
    with pytest.raises(UserError, match="summary.json: not valid JSON"):
        finished.read_summary()


@pytest.mark.parametrize(
    "stored",
    ['{"frames": ["float99", 2]}', '{"frames": ["float32", -2]}', '{"frames": [null, 2]}', '{"frames": 3}', "["],
)
def test_a_damaged_description_of_elements_is_not_taken_for_that_of_images(finished, stored):
    assert finished.read_spec() == {}  # of an earlier version
    finished.elements.write_text(stored)
    with pytest.raises(UserError, match=r"elements.json: not .*; put back a copy"):
        finished.read_spec()


def test_taking_a_folder_removes_what_a_killed_process_left_half_written(finished):
    finished.pictures.mkdir()
    names = {".summary.json.a1b2c3_d": True, ".metrics.jsonl.abcdefgh": True, ".mine.json.abcdefgh": False,
             ".summary.json": False, ".summary.json.old": False, "pictures/.step_1.png.abcdefgh": True}  # fmt: skip
    for name in names:
        (finished.path / name).write_text("")
    with finished.held():
        assert {name: not (finished.path / name).exists() for name in names} == names
    assert finished.read_summary() == {"status": "finished"}


def test_workdirs_that_cannot_be_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="--workdir is empty"):
        Workdir("")
    with pytest.raises(UserError, match="--workdir = .*File name too long"):
        Workdir("x" * 300)
    with pytest.raises(UserError, match=r"--workdir = a\\xff: not UTF-8"):
        Workdir(b"a\xff".decode(errors="surrogateescape")).check({}, "auto")
    assert list(tmp_path.iterdir()) == []
