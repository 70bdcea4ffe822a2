"""What a run says of its data before the first step."""

import numpy as np
import pytest

from jepa_jax.base.errors import UserError
from jepa_jax.config import groups
from jepa_jax.program.workdir import Workdir
from jepa_jax.training.run import machine_warnings, start_folder
from jepa_jax.training.setup import NO_HOOKS, prepare
from tests.projects.wildfire.evals.pixel_method import fire_config
from tests.runs import Silent, run, unlabelled
from tests.tiny import tiny_config


def said(folder, **arrays):
    """Returns what a run says that is started on 36 train and 12 test sequences."""
    rng, data = np.random.default_rng(0), folder / "data"
    for number in range(48):
        split = data / ("train" if number < 36 else "test")
        split.mkdir(parents=True, exist_ok=True)
        named = {name: make(number) for name, make in arrays.items()}
        fire, static = rng.integers(2, size=(4, 16, 16, 1)), rng.random((16, 16, 3))
        np.savez(split / f"{number}.npz", fire=fire, wind=rng.random((4, 2)), static=static, **named)
    config = fire_config(data__source="fire_sequences", data__dir=str(data), data__num_train=0, data__num_test=0)
    console = Silent()
    start_folder(prepare(config, Workdir(folder / "run"), console, NO_HOOKS))
    return console.lines


def test_a_run_on_files_that_name_no_fires_warns_once(tmp_path):
    lines = said(tmp_path)
    assert sum("no train file has a fire_id, so each of the 36 counts as a fire" in line for line in lines) == 1


def test_a_run_says_of_how_many_fires_its_sequences_are(tmp_path):
    lines = said(tmp_path, fire_id=lambda number: number // 3)
    assert any("27 train and 12 test sequences of 9 and 4 fires, 9 held out" in line for line in lines), lines
    assert not any("fire_id" in line for line in lines)


def test_test_images_of_classes_that_no_train_image_shows_are_refused_before_training(tmp_path):
    overrides = unlabelled(tmp_path)
    with np.load(tmp_path / "data.npz") as stored:
        labels = {"y_train": np.arange(96) % 2, "y_test": np.arange(32) % 6}
        np.savez(tmp_path / "data.npz", **labels, **stored)
    with pytest.raises(UserError, match="show none of 4 classes of the test images"):
        run(tmp_path / "run", eval__untrained=False, **overrides)
    assert not (tmp_path / "run").exists()


def test_settings_that_do_not_suit_a_machine_are_named(monkeypatch):
    monkeypatch.setattr(groups, "num_cores", lambda: 2)
    config = tiny_config(data__num_workers=16, train__precision="bfloat16")
    workers, precision = machine_warnings(config, "cpu")
    assert "num_workers = 16: 4 are started, two per core" in workers and "bfloat16: slower than float32" in precision
    assert list(machine_warnings(config, "gpu")) == [workers]
    assert not list(machine_warnings(tiny_config(data__num_workers=-1), "cpu"))
