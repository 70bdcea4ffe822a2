"""Statistics of a set are those of its pixels, are kept beside it, and reach the config."""

import dataclasses
import json

import numpy as np
import pytest

import jepa_jax
from jepa_jax.base.errors import EXIT_USER_ERROR, UserError
from jepa_jax.cli import train
from jepa_jax.config.groups import DataConfig
from jepa_jax.data.sources import open_source
from jepa_jax.data.statistics import channel_statistics, set_statistics, statistics_file
from jepa_jax.program.config import load_config, with_set_statistics
from tests.data.photos.pictures import write_photos
from tests.sequences import SequenceSource


def test_statistics_are_mean_and_deviation_of_all_pixels_per_channel(tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (120, 6, 6, 5), np.uint8)
    images[..., 3] = 51
    np.savez(tmp_path / "train.npz", x=images)
    np.savez(tmp_path / "test.npz", x=images[:2])
    data = DataConfig(source="npz", dir=str(tmp_path), image_size=6, channels=5)
    found = channel_statistics(open_source(data, "train"), 0)
    np.testing.assert_allclose(found.mean, images.mean(axis=(0, 1, 2)) / 255, atol=1e-4)
    np.testing.assert_allclose(found.std[:3], images.std(axis=(0, 1, 2))[:3] / 255, atol=1e-4)
    assert found.images == 120 and found.mean[3] == 0.2 and 0 < found.std[3] < 1e-3  # constant, and no division by 0
    assert set_statistics(data).mean == found.mean and statistics_file(data) == tmp_path / "statistics.json"
    kept = json.loads(statistics_file(data).read_text())
    statistics_file(data).write_text(json.dumps(kept | {"std": [0.1] * 5}))
    assert set_statistics(data).std == (0.1,) * 5  # what is kept is used
    statistics_file(data).write_text("damaged")
    assert set_statistics(data).mean == found.mean


def test_statistics_of_a_part_are_those_of_the_set_and_follow_the_set(tmp_path):
    images = np.repeat(np.arange(40, dtype=np.uint8), 6 * 6 * 3).reshape(40, 6, 6, 3)
    np.savez(tmp_path / "train.npz", x=images)
    data = DataConfig(source="npz", dir=str(tmp_path), image_size=6)
    whole = set_statistics(dataclasses.replace(data, num_train=3, validation=0.2))
    assert whole.images == 40 and whole.mean[0] == pytest.approx(19.5 / 255, abs=1e-4)
    np.savez(tmp_path / "train.npz", x=images[:20])
    assert set_statistics(data).mean[0] == pytest.approx(9.5 / 255, abs=1e-4)  # the set has changed
    kept = json.loads(statistics_file(data).read_text())
    assert kept["set"] == {"source": "npz", "image_size": 6, "channels": 3, "images": 20}
    for other in ({"source": "idx"}, {"image_size": 5}, {"images": 21}):
        statistics_file(data).write_text(json.dumps(kept | {"mean": [0.9] * 3, "set": kept["set"] | other}))
        assert set_statistics(data).mean[0] < 0.1


@pytest.mark.parametrize("recipe", ["photos_ijepa", "photos_lejepa"])
def test_photo_recipes_need_a_folder_and_nothing_else(tmp_path, recipe):
    assert load_config(recipe).data.augment.mean == (0.5, 0.5, 0.5)  # nothing is known of a set that is not there
    write_photos(tmp_path / "photos", 40, classes=0, size=(300, 260))
    config = with_set_statistics(load_config(recipe, {"data.dir": str(tmp_path / "photos")}), needs_data=True)
    kept = json.loads((tmp_path / "photos" / "statistics.json").read_text())
    assert config.data.augment.mean == tuple(kept["mean"]) and config.data.augment.std == tuple(kept["std"])
    assert config.loader_crops["crops"].size == 224


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data.augment.mean": "0.4,0.4,0.4"}, r"config.data.augment.mean = 0.4,0.4,0.4: data.statistics = set takes"),
        ({"data.augment.std": (0.2,) * 3}, r"config.data.augment.std = .*leave it out, or set data.statistics"),
        ({"data.dir": ""}, "config.data.dir = '': data.statistics = set needs the data"),
        ({"data.source": "shapes", "data.crops": "device"}, "config.data.statistics = set: shapes has no files"),
    ],
)
def test_statistics_that_would_be_ignored_or_made_up_are_refused(changes, message):
    with pytest.raises(UserError, match=message):
        load_config("photos_lejepa", changes)


def test_given_statistics_are_used_where_those_of_the_set_are_not_asked_for():
    given = load_config("photos_lejepa", {"data.statistics": "config", "data.augment.mean": (0.4,) * 3})
    assert given.data.augment.mean == (0.4,) * 3


def test_training_needs_the_set_that_its_statistics_are_of(tmp_path):
    changes = {"data.dir": str(tmp_path / "absent")}
    config = with_set_statistics(load_config("photos_lejepa", changes), needs_data=False)
    assert config.data.augment.std == (0.25,) * 3  # to describe and to plan
    with pytest.raises(UserError, match="config.data.dir = .*absent': no such file or folder"):
        jepa_jax.get_config("photos_lejepa", changes)
    arguments = [f"--config.data.dir={tmp_path / 'absent'}", f"--workdir={tmp_path / 'run'}"]
    assert train.TRAIN.main(["--config=photos_lejepa", *arguments]) == EXIT_USER_ERROR


def test_data_without_images_have_no_statistics():
    sequences = SequenceSource(DataConfig(num_train=1, num_test=1), "train")
    with pytest.raises(UserError, match="data.statistics = set: the data holds frames.* and no image"):
        channel_statistics(sequences, 0)
