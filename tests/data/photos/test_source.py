"""Loaders that cut crops out of full photographs: the same ones for any number of workers and from any step on."""

import contextlib

import jax
import numpy as np
import pytest

from jepa_jax.base.errors import UserError
from jepa_jax.config.augment import CropConfig, Crops
from jepa_jax.config.groups import DataConfig
from jepa_jax.data.augment import augment_crops, normalise
from jepa_jax.data.batches import batch_dataset
from jepa_jax.data.photos.crops import cropped_spec
from jepa_jax.data.pipeline import train_batches
from jepa_jax.data.sources import hold_out, open_source
from jepa_jax.program.config import changed_config
from jepa_jax.runtime.mesh import batch_sharding, make_mesh
from tests.data.photos.pictures import write_photos
from tests.tiny import tiny_config

CROPS = {"crops": Crops(2, 24, CropConfig()), "crops_small": Crops(3, 12, CropConfig(scale=(0.05, 0.3)))}


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    folder = tmp_path_factory.mktemp("photos")
    write_photos(folder)
    return folder


def settings(folder, **more):
    return DataConfig(source="folder", dir=str(folder), image_size=24, batch_size=8, **more)


def loaded(data, count, start_step=0, seed=3, source=None):
    sharding = batch_sharding(make_mesh(1, 1, jax.devices()[:1]))
    source = source or open_source(data, "train")
    with contextlib.closing(
        train_batches(data, source, seed=seed, sharding=sharding, start_step=start_step, crops=CROPS)
    ) as batches:
        return [jax.device_get(next(batches)[0]) for _ in range(count)]


def assert_same(first, second):
    for one, other in zip(first, second, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            np.testing.assert_array_equal(one[name], other[name])


@pytest.mark.usefixtures("quick_workers")
def test_crops_do_not_depend_on_workers_or_on_where_a_run_starts(photos):
    alone = loaded(settings(photos), 7)
    assert {name: array.shape for name, array in alone[0].items()} == {
        "crops": (8, 2, 24, 24, 3), "crops_small": (8, 3, 12, 12, 3), "label": (8,),
    }  # fmt: skip
    assert_same(loaded(settings(photos, num_workers=2), 7), alone)
    assert_same(loaded(settings(photos), 3, start_step=4), alone[4:])


def test_crops_differ_between_epochs_seeds_and_images(photos):
    source = open_source(settings(photos), "train")
    made = {
        (seed, epoch): source.cropped(CROPS, seed, epoch).batch(np.arange(4))["crops"]
        for seed, epoch in ((0, 0), (0, 1), (1, 0))
    }
    views = [view.tobytes() for batch in made.values() for image in batch for view in image]
    assert len(set(views)) == len(views)


def test_several_processes_load_parts_of_the_same_batch(photos):
    source = open_source(settings(photos), "train")
    whole = batch_dataset(source, 8, seed=3, crops=CROPS)[5]
    parts = [
        batch_dataset(source, 8, seed=3, crops=CROPS, process_index=index, process_count=2)[5] for index in range(2)
    ]
    for name, array in whole.items():
        np.testing.assert_array_equal(np.concatenate([part[name] for part in parts]), array)


def test_parts_of_a_source_can_be_cropped_too(photos):
    source = open_source(settings(photos), "train")
    train, held_out = hold_out(source, 0.25)
    assert train.cropped(CROPS, 0, 0).spec == cropped_spec(source.spec, CROPS)
    batch = held_out.cropped(CROPS, 0, 0).batch(np.arange(2))
    chosen = held_out._indices[:2]
    np.testing.assert_array_equal(batch["crops"], source.cropped(CROPS, 0, 0).batch(chosen)["crops"])


def test_an_unreadable_photograph_is_refused_or_named(photos, tmp_path):
    write_photos(tmp_path, 12)
    broken = sorted(tmp_path.rglob("*.jpg"))[0]
    broken.write_bytes(broken.read_bytes()[:100])
    indices = np.arange(len(open_source(settings(tmp_path), "train")))
    with pytest.raises(UserError, match=f"{broken}: cannot be read as an image"):
        open_source(settings(tmp_path), "train").cropped(CROPS, 0, 0).batch(indices)
    skipping = open_source(settings(tmp_path, on_error="skip"), "train").cropped(CROPS, 0, 0).batch(indices)
    assert skipping["skipped"] == [str(broken)] and len(skipping["crops"]) == len(indices)


def test_images_of_one_size_cannot_be_cropped_by_the_loader():
    data = DataConfig(source="shapes", num_train=20, num_test=4, batch_size=8)
    with pytest.raises(UserError, match="data.crops = loader: shapes delivers images of one size"):
        loaded(data, 1)


def test_crops_that_a_loader_made_are_only_mirrored_and_coloured_on_the_device():
    operations = ("flip", "jitter", "grayscale", "blur", "solarize")
    config = tiny_config(**{f"data__augment__{name}__probability": 0.0 for name in operations})
    augment = config.data.augment
    crops = np.random.default_rng(0).integers(0, 256, (4, 3, 8, 8, 3), np.uint8)
    plain = augment_crops(jax.random.key(0), crops, augment)
    expected = normalise(crops, augment.mean, augment.std).swapaxes(0, 1)
    np.testing.assert_allclose(plain, expected, atol=1e-5)
    mirroring = changed_config(config, {"data.augment.flip.probability": 1.0}).data.augment
    np.testing.assert_allclose(augment_crops(jax.random.key(0), crops, mirroring), expected[..., ::-1, :], atol=1e-5)


def test_a_folder_of_arrays_has_any_number_of_channels(tmp_path):
    bands = np.random.default_rng(0).integers(0, 256, (12, 30, 40, 6), np.uint8)
    for number, array in enumerate(bands):
        np.save(tmp_path / f"{number:02}.npy", array)
    source = open_source(DataConfig(source="folder", dir=str(tmp_path), image_size=24, channels=6), "train")
    assert source.batch(np.arange(3))["image"].shape == (3, 24, 24, 6)
    crops = source.cropped(CROPS, 0, 0)
    batch = crops.batch(np.arange(3))
    assert batch["crops"].shape == (3, 2, 24, 24, 6) and batch["crops_small"].shape == (3, 3, 12, 12, 6)
    means = batch["crops"].mean(axis=(0, 1, 2, 3))
    assert np.abs(means - 127.5).max() < 12  # no band is lost
