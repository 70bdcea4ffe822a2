"""What a run says of its data before the first step."""

import numpy as np
import pytest

from jepa_jax.base.errors import UserError
from jepa_jax.config import groups
from jepa_jax.program.workdir import Workdir
from jepa_jax.training.run import machine_warnings, start_folder
from jepa_jax.training.setup import NO_HOOKS, prepare
from tests.runs import Silent, run, unlabelled
from tests.sequence_methods import padded_config
from tests.tiny import tiny_config


def test_a_run_says_of_how_many_groups_its_sequences_are(tmp_path):
    console, config = Silent(), padded_config(data__num_train=36, data__num_test=12, data__validation=0.25)
    start_folder(prepare(config, Workdir(tmp_path / "run"), console, NO_HOOKS))
    expected = "28 train and 12 test sequences of 7 and 3 recordings, 8 held out"
    assert any(expected in line for line in console.lines), console.lines


def test_a_run_that_is_continued_is_not_finished_until_it_ends(tmp_path):
    folder = Workdir(tmp_path / "run")
    folder.create()
    folder.summary.write_text('{"status": "finished"}')  # of fewer epochs
    start_folder(prepare(tiny_config(), folder, Silent(), NO_HOOKS))
    assert folder.config.exists() and not folder.summary.exists()


def test_test_images_of_classes_that_no_train_image_shows_are_refused_before_training(tmp_path):
    overrides = unlabelled(tmp_path)
    with np.load(tmp_path / "data.npz") as stored:
        labels = {"y_train": np.arange(96) % 2, "y_test": np.arange(32) % 6}
        np.savez(tmp_path / "data.npz", **labels, **stored)
    with pytest.raises(UserError, match="show none of 4 classes of the test images"):
        run(tmp_path / "run", **overrides)
    assert not (tmp_path / "run").exists()


def test_settings_that_do_not_suit_a_machine_are_named(monkeypatch):
    monkeypatch.setattr(groups, "num_cores", lambda: 2)
    config = tiny_config(data__num_workers=16, train__precision="bfloat16")
    workers, precision = machine_warnings(config, "cpu")
    assert "num_workers = 16: 4 are started, two per core" in workers and "bfloat16: slower than float32" in precision
    assert list(machine_warnings(config, "gpu")) == [workers]
    assert not list(machine_warnings(tiny_config(data__num_workers=-1), "cpu"))
