"""Arrays of .npz files: the same images come back, and wrong content ends in one clear message."""

import numpy as np
import pytest

from jepa_jax.base.errors import UserError
from jepa_jax.data.contract import image_spec
from jepa_jax.data.sources import open_splits
from tests.data.opening import assert_survives_pickling, config, everything, opened


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


def test_splits_of_different_kinds_are_refused(tmp_path):
    images, labels = npz_arrays()
    np.savez(tmp_path / "train.npz", image=images, label=labels)
    for arrays in ({"image": images}, {"image": images, "label": np.full(5, 12)}):
        np.savez(tmp_path / "test.npz", **arrays)
        with pytest.raises(UserError, match="data.source = npz: the splits differ .*of 10 classes; test: image uint8"):
            open_splits(config("npz", tmp_path, image_size=12))
