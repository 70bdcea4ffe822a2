"""Tar files in the WebDataset layout: read as a stream that goes on from any state."""

import io
import tarfile

import jax
import numpy as np
import pytest
from PIL import Image

from jepa_jax.base.errors import DataLost, UserError
from jepa_jax.config.augment import CropConfig, Crops
from jepa_jax.config.groups import DataConfig
from jepa_jax.data.batches import batch_dataset
from jepa_jax.data.contract import image_spec
from jepa_jax.data.pipeline import train_batches
from jepa_jax.data.readers.webdataset import TarSamples
from jepa_jax.data.sources import open_source, open_splits
from jepa_jax.runtime.mesh import batch_sharding, make_mesh

CROPS = {"crops": Crops(2, 12, CropConfig())}


def write_tar(file, numbers, labelled=True):
    with tarfile.open(file, "w") as tar:
        for number in numbers:
            image = io.BytesIO()
            Image.new("RGB", (20, 16), (number, 0, 0)).save(image, format="PNG")
            parts = {"png": image.getvalue(), "json": b"{}"} | ({"cls": b"%d" % (number % 3)} if labelled else {})
            for ending, content in sorted(parts.items()):
                member = tarfile.TarInfo(f"photos/{number:04}.{ending}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))


def config(folder, **keys):
    return DataConfig(**{"source": "webdataset", "dir": str(folder), "image_size": 16, "num_train": 20} | keys)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tars")
    for shard in range(5):
        write_tar(folder / f"train-{shard:06}.tar", range(10 * shard, 10 * shard + 10))
    write_tar(folder / "val-000000.tar", range(100, 106))
    return folder


def numbers(batch):
    return batch["image"][:, 0, 0, 0].tolist()


def test_a_pass_has_every_sample_once_with_its_label(folder):
    train, test = open_splits(config(folder))
    assert train.spec == test.spec == image_spec(16) and (len(train), len(test)) == (20, 6)
    assert numbers(test.batch(np.arange(6))) == list(range(100, 106))
    batches = iter(batch_dataset(train, 10))
    seen = [next(batches) for _ in range(100)]
    for batch in seen:
        np.testing.assert_array_equal(batch["label"], np.array(numbers(batch)) % 3)
    drawn = [number for batch in seen for number in numbers(batch)]
    assert np.bincount(drawn).tolist() == [20] * 50  # in a window of 1,000
    assert len(set(drawn[:50])) > 25


@pytest.mark.parametrize("crops", [None, pytest.param(CROPS, marks=pytest.mark.slow)])
def test_it_goes_on_from_any_state(folder, crops):
    batches = batch_dataset(open_splits(config(folder))[0], 7, seed=3, crops=crops)
    iterator = iter(batches)
    seen = [(next(iterator), iterator.get_state()) for _ in range(12)]
    for start in (1, 7):
        again = iter(batches)
        again.set_state(seen[start][1])
        for batch, _ in seen[start + 1 :]:
            jax.tree.map(np.testing.assert_array_equal, next(again), batch)


def test_the_loader_crops_a_stream_that_does_not_stay_on_the_device(folder):
    source, sharding = open_splits(config(folder))[0], batch_sharding(make_mesh(1, 1, jax.devices()[:1]))
    data = config(folder, batch_size=4)
    wanted = next(iter(batch_dataset(source, 4, seed=1, crops=CROPS)))
    with train_batches(data, source, seed=1, sharding=sharding, crops=CROPS) as batches:
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(next(batches)[0]), wanted)
    with pytest.raises(UserError, match="data.pipeline = device: a stream cannot stay on the device"):
        train_batches(config(folder, pipeline="device"), source, seed=1, sharding=sharding)


def test_samples_of_one_file_go_on_from_any_state(folder):
    samples = TarSamples(str(folder / "train-000001.tar"))
    iterator = iter(samples)
    seen, states = [], [iterator.get_state()]
    for sample in iterator:
        seen.append(sample)
        states.append(iterator.get_state())
    assert [label for _, _, label in seen] == [number % 3 for number in range(10, 20)]
    for number, state in enumerate(states):
        again = iter(samples)
        again.set_state(state)
        assert list(again) == seen[number:]


def test_sets_without_labels_or_files(folder, tmp_path):
    write_tar(tmp_path / "train-0.tar", range(12), labelled=False)
    write_tar(tmp_path / "test-0.tar", range(4), labelled=False)
    train, _ = open_splits(config(tmp_path, num_train=8))
    assert train.spec == image_spec(16, labelled=False) and train.classes == ()
    with pytest.raises(UserError, match="data.num_train = 0: tar files have no length"):
        open_splits(config(folder, num_train=0))
    with pytest.raises(UserError, match="no train-\\*.tar there"):
        open_splits(config(tmp_path / "absent"))


def test_a_truncated_file_is_named(folder, tmp_path):
    content = (folder / "train-000000.tar").read_bytes()
    (tmp_path / "train-0.tar").write_bytes(content[: len(content) // 2 - 100])
    with pytest.raises(DataLost, match=f"{tmp_path}/train-0.tar: damaged at byte"):
        list(TarSamples(str(tmp_path / "train-0.tar")))


@pytest.mark.parametrize("damage", ["header", "boundary"])
def test_a_tar_that_ends_too_early_is_damaged_and_not_just_shorter(tmp_path, damage):
    write_tar(tmp_path / "a.tar", range(4))
    content = bytearray((tmp_path / "a.tar").read_bytes())
    with tarfile.open(tmp_path / "a.tar") as tar:
        place = tar.getmember("photos/0002.cls").offset
    content[place : place + 20] = b"\xff" * 20
    (tmp_path / "a.tar").write_bytes(content if damage == "header" else content[:place])
    with pytest.raises(DataLost, match="no end of the archive"):
        list(TarSamples(str(tmp_path / "a.tar")))


def test_tars_without_images_and_labels_that_are_no_class_are_refused(tmp_path, folder):
    with tarfile.open(tmp_path / "train-000000.tar", "w") as tar:
        tar.addfile(tarfile.TarInfo("0.bin"), io.BytesIO())
    with pytest.raises(UserError, match=r"no images in train-000000.tar"):
        open_splits(config(tmp_path))
    train = open_splits(config(folder))[0]
    for label in (50, -1):
        with pytest.raises(UserError, match=f"a.tar, 1: label {label} .*is not one of the 10 classes"):
            train.made([("a.tar, 1", b"", label)])


def test_an_epoch_of_more_samples_than_there_are_is_refused(folder):
    assert len(open_source(config(folder, num_train=50), "train")) == 50
    with pytest.raises(UserError, match="config.data.num_train = 51: the tar files hold 50 images; use at most that"):
        open_source(config(folder, num_train=51), "train")
