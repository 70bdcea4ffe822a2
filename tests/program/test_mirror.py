"""A mirror of a run: what is copied, what is fetched, and what is noticed."""

import json
import shutil

import fsspec
import pytest

from jepa_jax.base.errors import UserError
from jepa_jax.program.checksums import METADATA, write_checksums
from jepa_jax.program.mirror import Mirror
from jepa_jax.program.workdir import Workdir
from tests.runs import KillNine, Silent, rows, run


def checkpoint(workdir, step, content=b"weights"):
    folder = workdir.checkpoints / f"step_{step}"
    (folder / "state" / "d").mkdir(parents=True)
    (folder / "state" / "d" / "array").write_bytes(content)
    (folder / METADATA).write_text(json.dumps({"custom_metadata": {"checksums": "checksums.json", "step": step}}))
    write_checksums(folder)
    return folder


@pytest.fixture
def workdir(tmp_path):
    return Workdir(tmp_path / "run")


@pytest.fixture(params=["memory", "file"])
def url(request, tmp_path):
    path = f"{request.param}://{tmp_path / 'mirror'}"
    yield path
    if request.param == "memory":
        fsspec.filesystem("memory").store.clear()


def names(url):
    files, root = fsspec.core.url_to_fs(url)
    return sorted(path.removeprefix(root).lstrip("/") for path in files.find(root))


def test_whole_checkpoints_are_copied_and_old_ones_go_when_a_newer_one_is_there(workdir, url):
    mirror = Mirror(url, workdir, pytest.fail)
    checkpoint(workdir, 3)
    workdir.metrics.write_text("one\n")
    mirror.copy()
    expected = [f"checkpoints/step_3/{name}" for name in (METADATA, "checksums.json", "state/d/array")]
    assert names(url) == [*expected, "metrics.jsonl"]
    shutil.rmtree(workdir.checkpoints)
    mirror.copy()
    assert len(names(url)) == 4  # nothing newer: the only copy stays
    files, root = fsspec.core.url_to_fs(url)
    files.makedirs(f"{root}/checkpoints/step_5/state", exist_ok=True)
    files.pipe_file(f"{root}/checkpoints/step_5/state/array", b"")  # a copy that was cut short
    checkpoint(workdir, 6)
    mirror.copy()
    assert {name.split("/")[1] for name in names(url) if "/" in name} == {"step_6"}


def test_the_newest_whole_checkpoint_is_fetched_and_a_damaged_or_unfinished_one_is_not(workdir, url, tmp_path):
    for step in (3, 6, 9):
        checkpoint(workdir, step)
    workdir.config.write_text("{}")
    Mirror(url, workdir, pytest.fail).copy()
    files, root = fsspec.core.url_to_fs(url)
    files.rm(f"{root}/checkpoints/step_9/checksums.json")  # as if copying had been cut short
    files.pipe_file(f"{root}/checkpoints/step_6/state/d/array", b"weighty")
    warnings, empty = [], Workdir(tmp_path / "empty")
    empty.create()
    assert Mirror(url, empty, warnings.append).fetch() == "checkpoints/step_3"
    assert [path.name for path in empty.checkpoints.iterdir()] == ["step_3"] and empty.config.read_text() == "{}"
    assert len(warnings) == 1 and "step_6 is damaged: state/d/array: content differs" in warnings[0]
    files.pipe_file(f"{root}/checkpoints/step_3/state/d/array", b"")
    shutil.rmtree(empty.checkpoints)
    with pytest.raises(UserError, match="every checkpoint is damaged"):
        Mirror(url, empty, warnings.append).fetch()


def test_an_empty_mirror_is_a_start_and_one_that_cannot_be_written_costs_a_warning(workdir, tmp_path):
    workdir.create()
    assert Mirror(f"file://{tmp_path}/none", workdir, pytest.fail).fetch() == ""
    (tmp_path / "taken").write_text("a file")
    warnings = []
    workdir.config.write_text("{}")
    with Mirror(f"file://{tmp_path}/taken", workdir, warnings.append):
        pass
    assert len(warnings) == 1 and "taken: cannot be written" in warnings[0]


@pytest.mark.parametrize("url", ["nosuch://bucket/run"])
def test_a_url_that_nobody_knows_is_refused(workdir, url):
    with pytest.raises(UserError, match="train.mirror = nosuch"):
        Mirror(url, workdir, pytest.fail)


@pytest.mark.slow
def test_a_run_whose_disk_is_gone_continues_from_its_mirror_with_the_same_bits(tmp_path):
    def die(text):
        if text.startswith("epoch 2"):
            raise KillNine

    overrides = dict(train__mirror=f"file://{tmp_path}/mirror", eval__untrained=False)
    with pytest.raises(KillNine):
        run(tmp_path / "run", Silent(die), **overrides)
    shutil.rmtree(tmp_path / "run")
    console = Silent()
    resumed = run(tmp_path / "run", console, resume="must", **overrides)
    assert any(line.startswith("fetched checkpoints/step_") for line in console.lines)
    assert any(line.startswith("resumed at step") for line in console.lines)
    whole = run(tmp_path / "whole", eval__untrained=False)
    assert resumed["params_sha256"] == whole["params_sha256"]
    steps = [row["step"] for row in rows(tmp_path / "run") if "train/loss" in row]
    assert steps == list(range(1, 13))
