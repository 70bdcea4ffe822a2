"""WildfireSpreadTS: both kinds of files give the same elements, and each pixel of a fire counts once."""

import pickle

import h5py
import numpy as np
import pytest
import sklearn.metrics
import tifffile

from jepa_jax.base.errors import UserError
from jepa_jax.config.groups import DataConfig
from jepa_jax.data.sources import open_data
from jepa_jax.projects.wildfire.data.wsts import CHANNELS, FOLDS, SCALED, STATISTICS, Fire, squares
from jepa_jax.projects.wildfire.evals.truth import Truth, average_precision

YEARS = (2018, 2019, 2020, 2021)
DAYS, HEIGHT, WIDTH = 8, 71, 40


def days_of_a_fire(seed):
    """Returns the bands of 8 days as GeoTIFF files have them."""
    rng = np.random.default_rng(seed)
    bands = rng.normal(2, 1, (DAYS, 23, HEIGHT, WIDTH)).astype(np.float32)
    bands[:, [7, 13, 19]] = rng.uniform(0, 360, (DAYS, 3, HEIGHT, WIDTH))
    bands[:, 16] = rng.integers(1, 18, (HEIGHT, WIDTH))
    bands[:, 3, :2] = np.nan
    hhmm = rng.integers(0, 24, (DAYS, HEIGHT, WIDTH)) * 100 + rng.integers(0, 60, (DAYS, HEIGHT, WIDTH))
    bands[:, 22] = np.where(rng.random(hhmm.shape) < 0.1, hhmm, np.nan)
    return bands


def write_set(folder, kind):
    for year in YEARS:
        (folder / str(year)).mkdir(parents=True)
        bands = days_of_a_fire(year)
        if kind == "hdf5":
            bands[:, 22] = np.floor(np.nan_to_num(bands[:, 22]) / 100)
            with h5py.File(folder / str(year) / "fire_1.hdf5", "w") as file:
                file.create_dataset("data", data=bands).attrs["year"] = year
        else:
            (folder / str(year) / "fire_1").mkdir()
            for day, one in enumerate(bands):
                file = folder / str(year) / "fire_1" / f"{year}-08-0{day + 1}.tif"
                tifffile.imwrite(file, np.moveaxis(one, 0, -1), planarconfig="contig", photometric="minisblack")
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_set(tmp_path_factory.mktemp("wsts"), "hdf5")


def opened(folder, **keys):
    keys = dict(source="wsts", image_size=32, channels=CHANNELS, max_frames=3, validation=0.1) | keys
    return open_data(DataConfig(dir=str(folder), **keys))


def whole(source):
    return source.batch(np.arange(len(source)))


def test_hdf5_and_tiff_files_give_the_same_elements(folder, tmp_path):
    for one, other in zip(opened(folder), opened(write_set(tmp_path, "tiff")), strict=True):
        batch, same = whole(one), whole(other)
        for name in one.spec:
            np.testing.assert_array_equal(batch[name], same[name], name)
        assert batch["static"].min() >= 0 and batch["static"].max() <= 1 and np.isfinite(batch["wind"]).all()


def test_every_pair_of_years_is_trained_on_in_two_folds(folder):
    assert len(set(FOLDS)) == 12 and all(sorted(fold) == list(YEARS) for fold in FOLDS)
    assert sorted(2 * list(STATISTICS)) == sorted(fold[:2] for fold in FOLDS)
    assert all(len(values) == len(SCALED) for pair in STATISTICS.values() for values in pair)
    train, test, validation = opened(folder, fold=7)  # 2019 and 2020, 2021, 2018
    assert len(train) == 2 * (DAYS - 3) and len(np.unique(train.groups)) == 2
    for source, year in ((test, 2018), (validation, 2021)):
        active = np.nan_to_num(days_of_a_fire(year)[:, 22]) >= 100
        batch = whole(source)
        assert batch["target"][batch["known"]].sum() == active[5:, 4:68, 4:36].sum()  # the middle 64 x 32


def test_squares_count_each_pixel_of_the_middle_once():
    for height, width in ((64, 64), (71, 40), (20, 133), (97, 160)):
        counts = np.zeros((height, width), int)
        for (rows, columns), (own, also) in squares(Fire((), 1, height, width), 48):
            part = counts[rows, columns]
            part[own, also] += 1
        kept = [side // 32 * 32 or side for side in (height, width)]
        assert counts.max() == 1 and counts.sum() == np.prod(kept)
        assert counts[height // 2, width // 2] == 1


def test_maps_of_the_last_day_by_hand(folder):
    element = {name: array[0] for name, array in opened(folder).test.batch(np.array([0])).items()}
    bands = days_of_a_fire(2021)[2:6, :, 4:36, 4:36]  # days 2 to 4 of the history, 5 the target
    np.testing.assert_array_equal(element["fire"][..., 0], np.nan_to_num(bands[:3, 22]) >= 100)
    np.testing.assert_array_equal(element["target"][..., 0], np.nan_to_num(bands[3, 22]) >= 100)
    mean, deviation = STATISTICS[2018, 2019]
    static = np.moveaxis(element["static"], -1, 0)
    np.testing.assert_allclose(static[5], np.clip((bands[2, 5] - mean[5]) / deviation[5] / 10 + 0.5, 0, 1), atol=1e-6)
    np.testing.assert_allclose(static[18], (1 + np.sin(np.deg2rad(bands[2, 7]))) / 2, atol=1e-6)
    np.testing.assert_allclose(static[23], (1 + np.cos(np.deg2rad(bands[2, 19]))) / 2, atol=1e-6)
    np.testing.assert_array_equal(static[24:41].argmax(0) + 1, bands[2, 16])
    np.testing.assert_allclose(static[41], np.nan_to_num(bands[2, 22]) // 100 / 24, atol=1e-6)
    assert element["wind"].shape == (3, 2) and element["valid"].all()


def test_missing_values_have_the_mean(tmp_path):
    write_set(tmp_path, "hdf5")
    with h5py.File(tmp_path / "2021" / "fire_1.hdf5", "a") as file:
        file["data"][:, :22] = np.nan
    batch = whole(opened(tmp_path).test)
    assert (batch["static"][batch["known"][..., 0]][:, :24] == 0.5).all() and (batch["wind"] == 0).all()


def test_training_squares_are_full_of_fire_and_repeatable(folder):
    train = opened(folder).train
    batch, again = whole(train), whole(pickle.loads(pickle.dumps(train)))
    np.testing.assert_array_equal(batch["static"], again["static"])
    active = np.nan_to_num(np.stack([days_of_a_fire(year)[3:, 22] for year in (2018, 2019)])) >= 100
    assert batch["target"].mean() > 1.05 * active.mean() and batch["known"].all()


def test_the_metric_is_that_of_scikit_learn_pooled_over_the_test_year(folder):
    test = opened(folder).test
    batch, truth = whole(test), Truth.empty(test.spec, len(test))
    truth.fill(np.arange(len(test)), batch)
    scores = np.random.default_rng(0).random(truth.target.shape) + batch["fire"][:, -1, ..., 0]
    known = batch["known"]
    expected = sklearn.metrics.average_precision_score(batch["target"][known], scores[..., None][known])
    assert average_precision(truth.ranking(scores)) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda f: (f / "fire_1.hdf5").write_bytes(b"no"), "fire_1.hdf5: cannot be read as HDF5"),
        (lambda f: h5py.File(f / "a.hdf5", "w").close(), r"a.hdf5: data is \[\], expected \[days, 23"),
        (lambda f: (f / "fire_1.hdf5").unlink(), "2021: holds no fire; wsts needs <year>/<fire>.hdf5 or"),
        (lambda f: ((f / "b").mkdir(), (f / "b" / "1.tif").write_bytes(b"no")), "1.tif: cannot be read as TIFF"),
        (
            lambda f: ((f / "b").mkdir(), tifffile.imwrite(f / "b" / "1.tif", np.zeros((4, 4, 5), np.float32))),
            "1.tif: .*expected 23 bands|1.tif: cannot be read as TIFF",
        ),
    ],
)
def test_files_of_another_layout_are_one_error(tmp_path, spoil, message):
    write_set(tmp_path, "hdf5")
    spoil(tmp_path / "2021")
    with pytest.raises(UserError, match=message):
        opened(tmp_path)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"fold": 12}, "data.fold = 12: wsts has the folds 0 to 11"),
        ({"channels": 3}, "set data.channels = 42"),
        ({"max_frames": 8}, "no fire of the train years has more than 8 days"),
    ],
)
def test_keys_that_do_not_fit_are_one_error(folder, keys, message):
    with pytest.raises(UserError, match=message):
        opened(folder, **keys)
