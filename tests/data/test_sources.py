"""Files on disk: what is read equals what was written, and every kind of damage ends in one clear message."""

import gzip
import io
import pickle
import shutil
import sys

import numpy as np
import pytest
from PIL import Image

from jepa_jax.base.errors import UserError
from jepa_jax.config.groups import DataConfig
from jepa_jax.data.contract import image_spec
from jepa_jax.data.photos.crops import centre_crop
from jepa_jax.data.photos.decode import Photo
from jepa_jax.data.readers.tfds import TfdsSource
from jepa_jax.data.sources import open_source, open_splits


def config(source, directory, **kwargs):
    return DataConfig(source=source, dir=str(directory), **kwargs)


def opened(source, directory, split="train", **kwargs):
    return open_source(config(source, directory, **kwargs), split)


def everything(source):
    return source.batch(np.arange(len(source)))


def assert_survives_pickling(source):
    data = pickle.dumps(source)
    assert len(data) < 3000
    np.testing.assert_array_equal(everything(pickle.loads(data))["image"], everything(source)["image"])


def test_unknown_source_lists_the_known_ones():
    with pytest.raises(UserError, match="config.data.source = .cifar100.: not one of shapes, cifar10, .*tfds:<name>"):
        opened("cifar100", "")
    with pytest.raises(UserError, match="config.data.source = 'no.such.module:Read': there is no module no"):
        opened("no.such.module:Read", "")


def test_a_source_of_the_users_own():
    train, test = open_splits(config("tests.data.fires:FireSource", "", num_train=6, num_test=2))
    assert (len(train), len(test), train.classes) == (6, 2, ()) and set(train.spec) == {"fire", "length"}
    np.testing.assert_array_equal(train.batch(np.array([4, 1]))["length"], [1, 2])


def test_splits_of_different_kinds_are_refused(tmp_path):
    images, labels = npz_arrays()
    np.savez(tmp_path / "train.npz", image=images, label=labels)
    for arrays in ({"image": images}, {"image": images, "label": np.full(5, 12)}):
        np.savez(tmp_path / "test.npz", **arrays)
        with pytest.raises(UserError, match="data.source = npz: the splits differ .*of 10 classes; test: image uint8"):
            open_splits(config("npz", tmp_path, image_size=12))


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
    with pytest.raises(UserError, match="train-images-idx3-ubyte: 4,715 bytes, expected 4,720"):
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
    with pytest.raises(UserError, match="train/cow: no image in this class folder"):
        opened("folder", photos)
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


# npz


def npz_arrays(n=5, channels=(3,)):
    rng = np.random.default_rng(2)
    return rng.integers(0, 256, (n, 12, 12, *channels), np.uint8), rng.integers(0, 4, n)


def test_npz_one_file_two_files_and_grey(tmp_path):
    images, labels = npz_arrays()
    np.savez(tmp_path / "train.npz", images=images, labels=labels)
    np.savez(tmp_path / "test.npz", x=images[..., 0], y=labels[:, None])
    np.savez(tmp_path / "both.npz", x_train=images, y_train=labels, x_test=images[:2], y_test=labels[:2])
    train = opened("npz", tmp_path, image_size=12)
    np.testing.assert_array_equal(everything(train)["image"], images)
    np.testing.assert_array_equal(everything(train)["label"], labels)
    test = everything(opened("npz", tmp_path, "test", image_size=12))
    np.testing.assert_array_equal(test["image"], np.repeat(images[..., :1], 3, -1))
    assert len(opened("npz", tmp_path / "both.npz", "test", image_size=12)) == 2
    assert_survives_pickling(train)


@pytest.mark.parametrize("channels", [1, 2, 4])
@pytest.mark.parametrize("labelled", [True, False])
def test_npz_keeps_any_number_of_channels_with_labels_or_without(tmp_path, channels, labelled):
    images, labels = npz_arrays(channels=(channels,))
    both = {"x_train": images, "x_test": images[:2]} | ({"y_train": labels, "y_test": labels[:2]} if labelled else {})
    np.savez(tmp_path / "both.npz", **both)
    train, test = open_splits(config("npz", tmp_path / "both.npz", image_size=12, channels=channels))
    assert train.spec == test.spec == image_spec(12, channels, labelled=labelled)
    assert len(train.classes) == (10 if labelled else 0)
    np.testing.assert_array_equal(everything(train)["image"], images)
    assert set(everything(test)) == set(test.spec)


def test_npz_of_other_channels_than_configured_is_refused(tmp_path):
    np.savez(tmp_path / "train.npz", image=npz_arrays(channels=(4,))[0])
    with pytest.raises(UserError, match="data.channels = 3: npz has images of 4 channels; set data.channels = 4"):
        opened("npz", tmp_path, image_size=12)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"image": npz_arrays()[0] / 2.0, "label": np.zeros(5, int)}, "images are floats from 0 to .*scale them"),
        ({"image": npz_arrays()[0].astype(int) - 9, "label": np.zeros(5, int)}, "images are int64 from -"),
        ({"image": npz_arrays()[0].astype(int) * 257}, "images are int64 from 0 to [0-9]{5}; store uint8, uint16"),
        ({"image": npz_arrays()[0].astype(np.uint16)}, "images are uint16 but go up to 255 alone; store them as uint8"),
        ({"image": npz_arrays(channels=(3, 1))[0], "label": np.zeros(5, int)}, r"shape \(5, 12, 12, 3, 1\)"),
        ({"image": npz_arrays()[0], "kind": np.zeros(5, int)}, "holds image, kind; expected an array named label"),
        ({"image": npz_arrays()[0], "label": np.zeros(4, int)}, r"labels are int64 \(4,\) for 5 images"),
        ({"image": npz_arrays()[0], "label": np.zeros(5)}, "labels are float64"),
        ({"image": npz_arrays()[0], "label": np.full(5, -1)}, "expected integers from 0 on"),
        ({"image": npz_arrays(0)[0], "label": np.zeros(0, int)}, "holds no image"),
        ({"picture": npz_arrays()[0]}, "holds picture; expected an array named image or images or x"),
        ({"image": np.array([{}]), "label": np.zeros(1, int)}, "not a readable .npz file"),  # would need a pickle
    ],
)
def test_npz_wrong_content_is_named(tmp_path, arrays, message):
    np.savez(tmp_path / "train.npz", **arrays)
    with pytest.raises(UserError, match=f"train.npz: .*{message}"):
        opened("npz", tmp_path, image_size=12)


@pytest.mark.parametrize(("dtype", "scale"), [("i8", 1), ("i4", 1), ("<u2", 257), (">u2", 257), ("u4", 1)])
def test_npz_of_wider_integers_holds_the_same_images(tmp_path, dtype, scale):
    images = npz_arrays()[0]
    np.savez(tmp_path / "train.npz", image=(images.astype(int) * scale).astype(dtype))
    np.testing.assert_array_equal(everything(opened("npz", tmp_path, image_size=12))["image"], images)


def test_npz_under_the_usual_names(tmp_path):
    images, labels = npz_arrays(40)
    for train in (
        dict(X_train=images, Y_train=labels, x_val=images[:3], y_val=labels[:3]),
        dict(train_images=images, train_labels=labels, test_images=images[:3], test_labels=labels[:3]),
    ):
        np.savez(tmp_path / "both.npz", **train)
        found, test = open_splits(config("npz", tmp_path / "both.npz", image_size=12))
        np.testing.assert_array_equal(everything(found)["image"], images)
        np.testing.assert_array_equal(everything(test)["label"], labels[:3])
    np.savez(tmp_path / "folder_train.npz", images=images)
    (tmp_path / "folder_train.npz").rename(tmp_path / "train.npz")
    np.savez(tmp_path / "val.npz", x=images[:2])
    assert [len(part) for part in open_splits(config("npz", tmp_path, image_size=12))] == [40, 2]


@pytest.mark.parametrize("labelled", [True, False])
def test_npz_without_splits_is_divided(tmp_path, labelled):
    images, labels = npz_arrays(40)
    np.savez(tmp_path / "all.npz", x=images, **({"y": labels} if labelled else {}))
    train, test = open_splits(config("npz", tmp_path / "all.npz", image_size=12))
    assert (len(train), len(test), bool(train.classes)) == (36, 4, labelled)
    rows = {image.tobytes() for part in (train, test) for image in everything(part)["image"]}
    assert rows == {image.tobytes() for image in images}


def test_npz_of_floats_and_of_another_size_are_converted(tmp_path):
    images, labels = npz_arrays(4)
    np.savez(tmp_path / "train.npz", image=images / 255, label=labels)
    np.testing.assert_array_equal(everything(opened("npz", tmp_path, image_size=12))["image"], images)
    np.savez(tmp_path / "train.npz", image=np.repeat(np.repeat(images, 2, 1), 3, 2), label=labels)  # 24 x 36
    smaller = everything(opened("npz", tmp_path, image_size=8))["image"]
    assert smaller.shape == (4, 8, 8, 3)
    flat = np.broadcast_to(np.uint8([9, 99, 199]), (4, 30, 50, 3))
    np.savez(tmp_path / "train.npz", image=flat, label=labels)
    np.testing.assert_array_equal(everything(opened("npz", tmp_path, image_size=16))["image"], flat[:, :16, :16])


def test_npz_missing_and_truncated(tmp_path):
    with pytest.raises(UserError, match="no such file"):
        opened("npz", tmp_path / "x.npz")
    with pytest.raises(UserError, match="train.npz: missing"):
        opened("npz", tmp_path)
    images, labels = npz_arrays()
    np.savez(tmp_path / "train.npz", image=images, label=labels)
    data = (tmp_path / "train.npz").read_bytes()
    (tmp_path / "train.npz").write_bytes(data[: len(data) // 2])
    with pytest.raises(UserError, match="train.npz: not a readable .npz file"):
        opened("npz", tmp_path)


# TFDS, prepared here without TensorFlow: images are handed over as PNG bytes.


@pytest.fixture(scope="module")
def prepared_tfds(tmp_path_factory):
    tfds = pytest.importorskip("tensorflow_datasets")
    rng = np.random.default_rng(3)
    images = {
        "train": rng.integers(0, 256, (6, 16, 16, 3), np.uint8),
        "test": rng.integers(0, 256, (2, 16, 16, 3), np.uint8),
    }

    class TinyPictures(tfds.core.GeneratorBasedBuilder):
        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            features = {
                "image": tfds.features.Image(shape=(16, 16, 3)),
                "label": tfds.features.ClassLabel(names=["a", "b"]),
            }
            return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

        def _split_generators(self, manager):
            return {split: self._generate_examples(images[split]) for split in images}

        def _generate_examples(self, pictures):
            for i, picture in enumerate(pictures):
                buffer = io.BytesIO()
                Image.fromarray(picture).save(buffer, format="PNG")
                yield i, {"image": buffer.getvalue(), "label": i % 2}

    directory = tmp_path_factory.mktemp("tfds")
    TinyPictures(data_dir=str(directory), file_format="array_record").download_and_prepare()
    return directory, images


def test_tfds_reads_prepared_array_records(prepared_tfds):
    directory, images = prepared_tfds
    source = opened("tfds:tiny_pictures", directory, image_size=16)
    assert (len(source), source.classes, source.spec) == (6, ("a", "b"), image_spec(16))
    first, again = everything(source), everything(source)  # decoded, then from memory
    np.testing.assert_array_equal(first["image"], again["image"])
    assert sorted(i.tobytes() for i in first["image"]) == sorted(i.tobytes() for i in images["train"])
    place = {image.tobytes(): i for i, image in enumerate(images["train"])}
    assert [place[image.tobytes()] % 2 for image in first["image"]] == first["label"].tolist()
    np.testing.assert_array_equal(source.batch(np.array([4, 4, 0]))["image"], first["image"][[4, 4, 0]])
    assert len(opened("tfds:tiny_pictures", directory, "test", image_size=16)) == 2
    assert_survives_pickling(source)
    grey = opened("tfds:tiny_pictures", directory, image_size=16, channels=1)
    assert everything(grey)["image"].shape == (6, 16, 16, 1)


def test_tfds_names_what_it_skips_while_it_fills_its_memory(prepared_tfds):
    class Damaged(TfdsSource):
        def content(self, index):
            content = super().content(index)
            return b"damaged" if index == 2 else content

    source = Damaged(config("tfds:tiny_pictures", prepared_tfds[0], image_size=16, on_error="skip"), "train")
    first = everything(source)
    assert first["skipped"] == ["tfds:tiny_pictures, train record 2"]
    np.testing.assert_array_equal(first["image"][2], first["image"][3])
    assert everything(source)["skipped"] == []  # from memory


def test_tfds_missing_data_package_or_size(prepared_tfds, tmp_path, monkeypatch):
    directory, _ = prepared_tfds
    with pytest.raises(UserError, match="data.image_size = 32: tfds:tiny_pictures has images of 16 x 16"):
        opened("tfds:tiny_pictures", directory)
    with pytest.raises(UserError, match="data.dir = .*: holds no prepared tiny_pictures; prepare it with"):
        opened("tfds:tiny_pictures", tmp_path)
    with pytest.raises(UserError, match="no such folder"):
        opened("tfds:tiny_pictures", "")
    with pytest.raises(UserError, match="data.source = tfds:no_such_set: .*not found"):
        opened("tfds:no_such_set", directory)
    with pytest.raises(UserError, match="data.num_train = 7: the data has 6 images"):
        opened("tfds:tiny_pictures", directory, image_size=16, num_train=7)
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    with pytest.raises(UserError, match=r"pip install 'jepa_jax\[tfds\]'"):
        opened("tfds:tiny_pictures", directory)
