"""Files on disk: what is read equals what was written, and every kind of damage ends in one clear message."""

import gzip
import shutil

import numpy as np
import pytest
from PIL import Image

from jepa_jax.base.errors import UserError
from jepa_jax.data.contract import image_spec
from jepa_jax.data.photos.crops import centre_crop
from jepa_jax.data.photos.decode import Photo
from jepa_jax.data.sources import open_splits
from tests.data.opening import assert_survives_pickling, config, everything, opened


def test_unknown_source_lists_the_known_ones():
    with pytest.raises(UserError, match="config.data.source = .cifar100.: not one of shapes, cifar10, .*tfds:<name>"):
        opened("cifar100", "")
    with pytest.raises(UserError, match="config.data.source = 'no.such.module:Read': there is no module no"):
        opened("no.such.module:Read", "")


def test_a_source_of_the_users_own():
    train, test = open_splits(config("tests.sequences:SequenceSource", "", num_train=6, num_test=2))
    assert (len(train), len(test), train.classes) == (6, 2, ()) and set(train.spec) == {"frames", "length"}
    np.testing.assert_array_equal(train.batch(np.array([4, 1]))["length"], [1, 2])


# The MNIST family.


def idx_bytes(array):
    shape = np.array(array.shape, ">u4").tobytes()
    return bytes([0, 0, 8, array.ndim]) + shape + array.astype(np.uint8).tobytes()


def write_idx(directory, compress=False):
    images = np.random.default_rng(1).integers(0, 256, (6, 28, 28), np.uint8)
    labels = np.array([3, 1, 4, 1, 5, 9])
    pack, ending = (gzip.compress, ".gz") if compress else (bytes, "")
    for prefix in ("train", "t10k"):
        (directory / f"{prefix}-images-idx3-ubyte{ending}").write_bytes(pack(idx_bytes(images)))
        (directory / f"{prefix}-labels-idx1-ubyte{ending}").write_bytes(pack(idx_bytes(labels)))
    return images, labels


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("split", ["train", "test"])
def test_idx_repeats_grey_and_pads(tmp_path, compress, split):
    images, labels = write_idx(tmp_path, compress)
    plain, padded = opened("idx", tmp_path, split, image_size=28), opened("idx", tmp_path, split, image_size=32)
    np.testing.assert_array_equal(everything(plain)["image"], np.stack([images] * 3, -1))
    np.testing.assert_array_equal(everything(padded)["image"][:, 2:-2, 2:-2], everything(plain)["image"])
    assert everything(padded)["image"][:, :2].max() == 0 and padded.spec == image_spec(32)
    grey = opened("idx", tmp_path, split, image_size=28, channels=1)
    np.testing.assert_array_equal(everything(grey)["image"][..., 0], images)
    np.testing.assert_array_equal(everything(plain)["label"], labels)
    assert len(plain.classes) == 10
    assert_survives_pickling(plain)


def test_idx_damage_is_named(tmp_path):
    with pytest.raises(UserError, match="no such folder"):
        opened("idx", "")
    with pytest.raises(UserError, match=r"train-images-idx3-ubyte\[.gz\]: missing"):
        opened("idx", tmp_path)
    images, _ = write_idx(tmp_path)
    with pytest.raises(UserError, match="data.image_size = 20: .*28 x 28"):
        opened("idx", tmp_path, image_size=20)
    file = tmp_path / "train-images-idx3-ubyte"
    good = file.read_bytes()
    file.write_bytes(good[:-5])
    with pytest.raises(UserError, match="train-images-idx3-ubyte: less than the 4,704 bytes that it claims"):
        opened("idx", tmp_path)
    file.write_bytes(b"\0\0\x0d\x03" + good[4:])
    with pytest.raises(UserError, match="starts with 00000d03, expected 00000803"):
        opened("idx", tmp_path)
    file.write_bytes(idx_bytes(images[:5]))
    with pytest.raises(UserError, match="6 labels for 5 images"):
        opened("idx", tmp_path)
    file.unlink()
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(good)[:-100])
    with pytest.raises(UserError, match="train-images-idx3-ubyte.gz: cannot be read"):
        opened("idx", tmp_path)


# Folders of images.


def write_image(file, colour, size=(40, 50)):
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(file)


@pytest.fixture
def photos(tmp_path):
    for split in ("train", "test"):
        for label, name in enumerate(("ant", "bee")):
            for i, ending in enumerate(("jpg", "png", "webp", "JPEG")):
                write_image(tmp_path / split / name / f"{i}.{ending}", (200 * label, 60 * i, 30))
    (tmp_path / "train" / "ant" / "notes.txt").write_text("not an image")
    return tmp_path


def test_folder_labels_and_sizes(photos):
    source = opened("folder", photos)
    batch = everything(source)
    assert source.classes == ("ant", "bee") and len(source) == 8 and source.spec == image_spec(32)
    assert batch["image"].shape == (8, 32, 32, 3) and batch["skipped"] == []
    # Colours were chosen by label; JPEG keeps them within a few levels.
    np.testing.assert_allclose(batch["image"][:, 16, 16, 0], 200.0 * batch["label"], atol=6)
    assert_survives_pickling(source)
    limited = everything(opened("folder", photos, num_train=5))
    np.testing.assert_array_equal(limited["image"], batch["image"][:5])
    assert set(limited["label"]) == {0, 1}  # the first images are a mixture of classes


def test_folder_decodes_shorter_side_then_centre(tmp_path):
    # Left third red, middle third green, right third blue: the centre square of a 3:1 picture is the green third.
    picture = np.zeros((40, 120, 3), np.uint8)
    for third in range(3):
        picture[:, 40 * third : 40 * (third + 1), third] = 255
    Image.fromarray(picture).save(tmp_path / "x.png")
    decoded = centre_crop(Photo((tmp_path / "x.png").read_bytes(), 3), 20)
    assert decoded.shape == (20, 20, 3)
    np.testing.assert_array_equal(decoded[:, 2:-2], np.broadcast_to(np.uint8([0, 255, 0]), (20, 16, 3)))
    Image.fromarray(picture[..., 0]).save(tmp_path / "grey.png")
    grey = centre_crop(Photo((tmp_path / "grey.png").read_bytes(), 3), 20)
    np.testing.assert_array_equal(grey[..., 0], grey[..., 2])


def test_folder_without_splits_is_split_by_path(tmp_path):
    for label in "ab":
        for i in range(60):
            write_image(tmp_path / label / f"{i}.png", (i, 0, 0), (8, 8))
    train, test = (opened("folder", tmp_path, split, image_size=8) for split in ("train", "test"))
    assert len(train) + len(test) == 120 and 3 <= len(test) <= 25
    assert not set(train._names) & set(test._names)
    write_image(tmp_path / "a" / "new.png", (0, 0, 0), (8, 8))  # a new image moves no other
    assert set(opened("folder", tmp_path, "test", image_size=8)._names) >= set(test._names)


@pytest.mark.parametrize("place", ["", "train"])
def test_a_flat_folder_is_unlabelled(tmp_path, place):
    for i in range(60):
        write_image(tmp_path / place / f"{i}.png", (i, 0, 0), (8, 8))
    if place:
        write_image(tmp_path / "val" / "a.png", (99, 0, 0), (8, 8))
    (tmp_path / place / ".thumbnails").mkdir()
    train, test = open_splits(config("folder", tmp_path, image_size=8))
    assert train.classes == test.classes == () and train.spec == test.spec == image_spec(8, labelled=False)
    levels = [sorted(everything(source)["image"][:, 4, 4, 0].tolist()) for source in (train, test)]
    if place:
        assert levels == [list(range(60)), [99]]
    else:
        assert sorted(levels[0] + levels[1]) == list(range(60)) and 1 <= len(test) <= 15
    assert set(everything(train)) == {"image", "skipped"}
    assert_survives_pickling(train)


def test_folders_with_images_in_and_beside_class_folders_are_refused(photos):
    write_image(photos / "train" / "stray.png", (0, 0, 0))
    with pytest.raises(UserError, match="train/stray.png: an image beside the folder ant; sort all images"):
        opened("folder", photos)
    (photos / "train" / "stray.png").unlink()
    shutil.rmtree(photos / "test")
    write_image(photos / "test" / "x.png", (0, 0, 0))
    with pytest.raises(UserError, match="test: has no class folders, but .*train has"):
        opened("folder", photos, "test")


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_image_files_are_converted_to_the_channels_asked_for(tmp_path, channels):
    (tmp_path / "train").mkdir()
    Image.new("RGBA", (8, 8), (200, 100, 50, 128)).save(tmp_path / "train" / "x.png")
    source = opened("folder", tmp_path, image_size=8, channels=channels)
    assert source.spec == image_spec(8, channels, labelled=False)
    expected = {1: [189], 3: [227, 177, 152], 4: [200, 100, 50, 128]}[channels]  # half transparent, on white
    assert everything(source)["image"][0, 4, 4].tolist() == expected


def test_image_files_have_no_two_channels(tmp_path):
    write_image(tmp_path / "x.png", (0, 0, 0))
    with pytest.raises(UserError, match="data.channels = 2: use 1"):
        opened("folder", tmp_path, channels=2)


def test_folder_unreadable_image_is_refused_or_skipped(photos):
    broken = photos / "train" / "bee" / "1.png"
    broken.write_bytes(broken.read_bytes()[:60])
    with pytest.raises(UserError, match=f"{broken}: cannot be read as an image .*data.on_error = skip"):
        everything(opened("folder", photos))
    source = opened("folder", photos, on_error="skip")
    batch = everything(source)
    assert batch["skipped"] == [str(broken)]
    place = [name.decode() for name in source._names].index("bee/1.png")
    replaced = (place + 1) % 8
    np.testing.assert_array_equal(batch["image"][place], batch["image"][replaced])
    assert batch["label"][place] == batch["label"][replaced]
    for file in (photos / "train").rglob("*.*"):
        file.write_bytes(b"nothing")
    with pytest.raises(UserError, match="nor any other of 8 images can be read"):
        everything(opened("folder", photos, on_error="skip"))


def test_folder_bad_trees_are_refused(photos, tmp_path_factory):
    with pytest.raises(UserError, match="no such folder"):
        opened("folder", photos / "nowhere")
    with pytest.raises(UserError, match="holds no images .* and no class folders"):
        opened("folder", tmp_path_factory.mktemp("empty"))
    (photos / "train" / "cow").mkdir()
    with pytest.raises(UserError, match="train/cow: this class folder holds no images"):
        opened("folder", photos)
    (photos / "train" / "cow" / "IMG_1.HEIC").touch()  # of a phone
    with pytest.raises(UserError, match="IMG_1.HEIC is not read: .* heif-convert"):
        opened("folder", photos)
    (photos / "train" / "cow" / "IMG_1.HEIC").unlink()
    (photos / "train" / "cow").rmdir()
    write_image(photos / "test" / "dog" / "1.png", (0, 0, 0))
    with pytest.raises(UserError, match="test/dog: a class that .*train does not have"):
        opened("folder", photos, "test")
    (photos / "test").rename(photos / "other")
    with pytest.raises(UserError, match="has train but neither test nor val"):
        opened("folder", photos, "test")
    (photos / "other" / "dog" / "1.png").unlink()
    (photos / "other" / "dog").rmdir()
    (photos / "other").rename(photos / "val")
    assert len(opened("folder", photos, "test")) == 8
