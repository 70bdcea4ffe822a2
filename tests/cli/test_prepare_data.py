"""`jepa-jax prepare-data`: shards, statistics, and data that is there already."""

import json

import numpy as np
import pytest

from jepa_jax.base.errors import EXIT_OK, EXIT_USER_ERROR
from jepa_jax.cli import prepare_data
from jepa_jax.data.readers import cifar
from tests.data.photos.pictures import write_photos


def printed(capsys):
    return json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.fixture
def photos(tmp_path):
    write_photos(tmp_path / "photos", 40)
    return tmp_path / "photos"


def test_shards_are_written_and_verified(photos, tmp_path, capsys):
    command = ["shards", str(photos), f"--dir={tmp_path / 'shards'}"]
    assert prepare_data.PREPARE_DATA.main(command) == EXIT_OK
    said = printed(capsys)
    assert said["train"] + said["test"] == 40 and said["shards"] == 2 and said["source"] == "shards"
    assert prepare_data.PREPARE_DATA.main(command) == EXIT_USER_ERROR
    assert "manifest.json: exists" in capsys.readouterr().err


def test_statistics_are_kept_beside_the_data(photos, capsys):
    assert prepare_data.PREPARE_DATA.main(["statistics", str(photos), "--image_size=32"]) == EXIT_OK
    said = printed(capsys)
    kept = json.loads((photos / "statistics.json").read_text())
    about = kept.pop("set")
    assert kept == {name: said[name] for name in ("mean", "std", "images")} and len(kept["mean"]) == 3
    assert about == {"source": "folder", "image_size": 32, "channels": 3, "images": kept["images"]}


@pytest.mark.parametrize("command", [["shards"], ["shards", "somewhere"], ["statistics"], ["cifar10"]])
def test_what_is_missing_is_named(command, capsys):
    assert prepare_data.PREPARE_DATA.main(command) == EXIT_USER_ERROR
    assert "missing: " in capsys.readouterr().err


def test_arrays_are_no_photographs(tmp_path, capsys):
    np.savez(tmp_path / "all.npz", x=np.zeros((20, 224, 224, 3), np.uint8))
    command = ["shards", str(tmp_path / "all.npz"), "--source=npz", f"--dir={tmp_path / 'shards'}"]
    assert prepare_data.PREPARE_DATA.main(command) == EXIT_USER_ERROR
    assert "--source=npz: holds arrays" in capsys.readouterr().err


def test_cifar10_that_is_there_is_not_downloaded(tmp_path, capsys, monkeypatch):
    (tmp_path / "cifar-10-batches-bin").mkdir()
    for name in cifar.BINARY["train"] + cifar.BINARY["test"]:
        (tmp_path / "cifar-10-batches-bin" / name).write_bytes(bytes(2 * cifar.RECORD))
    monkeypatch.setattr(cifar, "IMAGES_PER_FILE", 2)
    monkeypatch.setattr(prepare_data, "download", lambda *arguments: pytest.fail("it is there"))
    assert prepare_data.PREPARE_DATA.main(["cifar10", f"--dir={tmp_path}"]) == EXIT_OK
    assert printed(capsys) == {"source": "cifar10", "dir": str(tmp_path), "train": 10, "test": 2}
