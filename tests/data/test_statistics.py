"""Statistics of a set are those of its pixels, are kept beside it, and reach the config."""

import json

import numpy as np
import pytest

from jepa_jax.config.groups import DataConfig
from jepa_jax.data.sources import open_source
from jepa_jax.data.statistics import channel_statistics, set_statistics, statistics_file
from jepa_jax.program.config import load_config
from tests.data.photos.pictures import write_photos


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
    statistics_file(data).write_text(json.dumps({"mean": [0.5] * 5, "std": [0.1] * 5, "images": 3}))
    assert set_statistics(data).std == (0.1,) * 5  # what is kept is used
    statistics_file(data).write_text("damaged")
    assert set_statistics(data).mean == found.mean


@pytest.mark.parametrize("recipe", ["photos_ijepa", "photos_lejepa"])
def test_photo_recipes_need_a_folder_and_nothing_else(tmp_path, recipe):
    assert load_config(recipe).data.augment.mean == (0.5, 0.5, 0.5)  # nothing is known of a set that is not there
    write_photos(tmp_path / "photos", 40, classes=0, size=(300, 260))
    config = load_config(recipe, {"data.dir": str(tmp_path / "photos")})
    kept = json.loads((tmp_path / "photos" / "statistics.json").read_text())
    assert config.data.augment.mean == tuple(kept["mean"]) and config.data.augment.std == tuple(kept["std"])
    assert config.loader_crops["crops"].size == 224
