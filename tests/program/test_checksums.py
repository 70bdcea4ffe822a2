"""Damaged checkpoints: nothing is silent, the newest whole one is used, and nothing is deleted."""

import json
import os
import pathlib
import random
import shutil

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from jepa_jax.base.errors import UserError
from jepa_jax.program import checksums
from jepa_jax.program.checkpoint import Checkpoints, open_whole
from jepa_jax.program.checksums import CHECKSUMS, METADATA, newest_whole, step_folders, verify, write_checksums
from tests.program.test_checkpoint import abstract, make_state


@pytest.fixture(scope="module")
def two_whole(tmp_path_factory):
    """A folder with checkpoints of steps 1 and 2."""
    folder = tmp_path_factory.mktemp("checkpoints")
    with Checkpoints(folder, keep=2) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, make_state(step=step), {"step": step}, {"norm": {"mean": np.ones(3)}})
    return folder


@pytest.fixture
def folder(two_whole, tmp_path):
    shutil.copytree(two_whole, tmp_path / "checkpoints")
    return tmp_path / "checkpoints"


def files(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


def array_file(folder):
    return max((path for path in files(folder) if path.parent.name == "d"), key=lambda path: path.stat().st_size)


def rewrite(path, change):
    path.write_bytes(change(path.read_bytes()))


def zeroed(content):
    return bytes(len(content))


def half(content):
    return content[: len(content) // 2]


def empty_all(folder):
    for path in files(folder):
        path.write_bytes(b"")


def empty_folder(folder):
    shutil.rmtree(folder)
    folder.mkdir()


def forget_checksums(folder):
    (folder / CHECKSUMS).unlink()


DAMAGE = {
    "array file truncated": lambda folder: rewrite(array_file(folder), half),
    "array file deleted": lambda folder: array_file(folder).unlink(),
    "array file zeroed": lambda folder: rewrite(array_file(folder), zeroed),
    "array file empty": lambda folder: rewrite(array_file(folder), lambda _: b""),
    "all files empty": empty_all,
    "nothing in the folder": empty_folder,
    "progress missing": lambda folder: shutil.rmtree(folder / "progress"),
    "progress truncated": lambda folder: rewrite(folder / "progress/metadata", half),
    "progress changed": lambda folder: rewrite(folder / "progress/metadata", lambda _: b'{"step": 7}'),
    "_METADATA garbage": lambda folder: rewrite(folder / "state/_METADATA", lambda _: b"\xff{"),
    "_sharding truncated": lambda folder: rewrite(folder / "state/_sharding", half),
    "manifest zeroed": lambda folder: rewrite(folder / "state/manifest.ocdbt", zeroed),
    "state missing": lambda folder: shutil.rmtree(folder / "state"),
    "statistics missing": lambda folder: shutil.rmtree(folder / "evaluated_stats"),
    "metadata of the step empty": lambda folder: rewrite(folder / METADATA, lambda _: b""),
    "file too many": lambda folder: (folder / "state/d/more").write_text("x"),
    "array file is a folder": lambda folder: ((path := array_file(folder)).unlink(), path.mkdir()),
    "checksums deleted": forget_checksums,
    "checksums garbage": lambda folder: rewrite(folder / CHECKSUMS, lambda _: b"[]"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_checkpoint_is_named_and_set_aside_and_the_one_before_is_used(folder, kind):
    DAMAGE[kind](folder / "step_2")
    warnings = []
    with Checkpoints(folder, keep=2, warn=warnings.append) as checkpoints:
        assert checkpoints.latest_step() == checkpoints.whole_step() == 1
        state, progress = checkpoints.restore(abstract(make_state()))
        checkpoints.set_aside_damaged()
        checkpoints.save(2, make_state(step=2), {"step": 2})  # as training does when it comes to this step again
    assert progress == {"step": 1}
    jax.tree.map(np.testing.assert_array_equal, state, make_state(step=1))
    assert len(warnings) == 1 and f"{folder / 'step_2'} is damaged: " in warnings[0]
    assert "set aside as damaged_step_2" in warnings[0]
    assert sorted(path.name for path in folder.iterdir()) == ["damaged_step_2", "step_1", "step_2"]
    assert verify(folder / "step_2").whole


@pytest.mark.parametrize("kind", DAMAGE)
def test_without_a_whole_checkpoint_the_files_are_named_and_stay_where_they_are(folder, kind):
    shutil.rmtree(folder / "step_1")
    DAMAGE[kind](folder / "step_2")
    with Checkpoints(folder) as checkpoints, pytest.raises(UserError, match="no whole checkpoint.*step_2 is damaged"):
        checkpoints.restore(abstract(make_state()))
    with pytest.raises(UserError, match=r"no whole checkpoint.*step_2 is damaged: .*: .*put back copies"):
        open_whole([folder])
    assert [path.name for path in folder.iterdir()] == ["step_2"]


def test_none_of_sixty_bit_flips_is_silent(folder):
    newest, chance = folder / "step_2", random.Random(0)
    assert verify(newest).whole
    for _ in range(60):
        path = chance.choice(files(newest))
        content = path.read_bytes()
        changed, place = bytearray(content), chance.randrange(len(content))
        changed[place] ^= 1 << chance.randrange(8)
        path.write_bytes(changed)
        name = path.relative_to(newest).as_posix()
        damage = verify(newest).damage
        assert damage, f"{name}, byte {place}"
        assert name == CHECKSUMS or damage[0].startswith(name)
        path.write_bytes(content)
    assert verify(newest).whole


def test_readers_skip_a_damaged_checkpoint_and_change_nothing(folder, capsys):
    array_file(folder / "step_2").unlink()
    (folder.parent / "best" / "step_9").mkdir(parents=True)
    before = files(folder.parent)
    with open_whole([folder.parent / "best", folder]) as checkpoints:
        assert checkpoints.latest_step() == 1
        assert checkpoints.restore(abstract(make_state()))[1] == {"step": 1}
    assert files(folder.parent) == before and (folder / "step_2").is_dir()
    words = "".join(capsys.readouterr().err.split())
    for damaged in ("best/step_9isdamaged", "checkpoints/step_2isdamaged"):
        assert damaged in words


def test_orbax_alone_restores_a_checkpoint_with_checksums(folder):
    with ocp.StandardCheckpointer() as plain:
        restored = plain.restore(folder / "step_2" / "state")
    np.testing.assert_array_equal(restored["params/model/layers/0/kernel"], np.full((2, 3), 2.5))
    with ocp.CheckpointManager(folder, options=ocp.CheckpointManagerOptions(step_prefix="step")) as manager:
        assert manager.all_steps() == [1, 2]
        restored = manager.restore(
            2, args=ocp.args.Composite(state=ocp.args.StandardRestore(), progress=ocp.args.JsonRestore())
        )
    assert restored["progress"] == {"step": 2}
    np.testing.assert_array_equal(restored["state"]["params/probe/bias"], np.ones(4))


def without_checksums(folder: pathlib.Path) -> None:
    """Makes a checkpoint look like one of an earlier version."""
    forget_checksums(folder)
    content = json.loads((folder / METADATA).read_text())
    (folder / METADATA).write_text(json.dumps(content | {"custom_metadata": {}}))


def test_a_checkpoint_of_an_earlier_version_is_read_with_one_warning(folder):
    without_checksums(folder / "step_2")
    warnings = []
    with Checkpoints(folder, warn=warnings.append) as checkpoints:
        state, _ = checkpoints.restore(abstract(make_state()))
    jax.tree.map(np.testing.assert_array_equal, state, make_state(step=2))
    assert len(warnings) == 1 and "step_2: has no checksums" in warnings[0]


def test_a_checkpoint_of_an_earlier_version_that_cannot_be_read_is_a_clear_error(folder):
    without_checksums(folder / "step_2")
    for data in (folder / "step_2" / "state").rglob("d/*"):  # also the copy that the process has written
        data.unlink()
    with (
        Checkpoints(folder, warn=lambda text: None) as checkpoints,
        pytest.raises(UserError, match=r"step_2: cannot be read .* no checksums"),
    ):
        checkpoints.restore(abstract(make_state()))


def test_an_unfinished_checkpoint_does_not_count_and_other_names_are_ignored(folder):
    for name in ("step_3.orbax-checkpoint-tmp-checked", "step_x", "damaged_step_7"):
        (folder / name).mkdir()
    assert [step for step, _ in step_folders(folder)] == [2, 1]
    found, damaged = newest_whole(folder)
    assert found is not None and found.step == 2 and not damaged
    with Checkpoints(folder):
        assert not (folder / "step_3.orbax-checkpoint-tmp-checked").exists()


def test_a_checkpoint_that_a_training_replaces_meanwhile_is_not_damaged(folder, monkeypatch):
    verified = []

    def replace_first(path):
        if not verified:
            shutil.rmtree(folder / "step_1")
            (folder / "step_2").rename(folder / "step_3")
            rewrite(folder / "step_3" / METADATA, lambda content: content.replace(b'"step": 2', b'"step": 3'))
            (folder / "step_3" / CHECKSUMS).unlink()
            write_checksums(folder / "step_3")
        verified.append(int(path.name.removeprefix("step_")))
        return verify(path)

    monkeypatch.setattr(checksums, "verify", replace_first)
    found, damaged = newest_whole(folder)
    assert found is not None and found.step == 3 and not damaged
    assert verified == [2, 1, 3]


def test_swapped_and_renamed_checkpoints_are_named_with_their_own_step(folder):
    (folder / "step_2").rename(folder / "aside")
    (folder / "step_1").rename(folder / "step_2")
    (folder / "aside").rename(folder / "step_1")
    found, damaged = newest_whole(folder)
    assert found is None
    assert [verdict.damage for verdict in damaged] == [
        ("renamed: it is the checkpoint of step 1, so call it step_1 again",),
        ("renamed: it is the checkpoint of step 2, so call it step_2 again",),
    ]


def test_a_checkpoint_renamed_to_a_later_step_is_not_in_the_way_of_saves(folder):
    (folder / "step_2").rename(folder / "step_48")
    with Checkpoints(folder, keep=2) as checkpoints:
        checkpoints.restore(abstract(make_state()))
        checkpoints.set_aside_damaged()
        checkpoints.save(3, make_state(step=3), {"step": 3})
    assert [step for step, _ in step_folders(folder)] == [3, 1] and (folder / "damaged_step_48").is_dir()


@pytest.mark.parametrize("kind", ["loop", "file", "closed"])
def test_a_folder_of_checkpoints_that_cannot_be_read_is_not_taken_for_empty(tmp_path, kind):
    folder = tmp_path / "checkpoints"
    if kind == "loop":
        folder.symlink_to(folder)
    elif kind == "file":
        folder.write_text("")
    else:
        folder.mkdir(mode=0)
        if os.access(folder, os.R_OK):
            pytest.skip("root may read everything")
    with pytest.raises(UserError, match="checkpoints: cannot be read"):
        step_folders(folder)
