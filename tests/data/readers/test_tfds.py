"""Data sets of TFDS, prepared here without TensorFlow."""

import numpy as np
import pytest

from jepa_jax.base.errors import UserError
from jepa_jax.data.contract import image_spec
from jepa_jax.data.elements import as_source
from jepa_jax.data.readers.tfds import TfdsSource
from tests.data.opening import assert_survives_pickling, config, everything, opened
from tests.data.tfds_pictures import prepare


@pytest.fixture(scope="module")
def prepared_tfds(tmp_path_factory):
    pytest.importorskip("tensorflow_datasets")
    rng = np.random.default_rng(3)
    images = {
        "train": rng.integers(0, 256, (6, 16, 16, 3), np.uint8),
        "test": rng.integers(0, 256, (2, 16, 16, 3), np.uint8),
    }

    directory = tmp_path_factory.mktemp("tfds")
    prepare(directory, images)
    return directory, images


def test_a_data_source_of_tfds_is_taken_as_it_is(prepared_tfds):
    tfds = pytest.importorskip("tensorflow_datasets")
    directory, images = prepared_tfds
    builder = tfds.builder("tiny_pictures", data_dir=str(directory))
    source = as_source(builder.as_data_source(split="train", decoders={"image": tfds.decode.SkipDecoding()}))
    assert (len(source), source.classes, set(source.spec)) == (6, ("a", "b"), {"label"})  # bytes are left out
    source = as_source(builder.as_data_source(split="train"))
    assert (source.spec, source.classes) == (image_spec(16), ("a", "b"))
    found = source.batch(np.arange(6))["image"]
    assert sorted(image.tobytes() for image in found) == sorted(image.tobytes() for image in images["train"])


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


def test_tfds_missing_data_or_another_size(prepared_tfds, tmp_path):
    directory, _ = prepared_tfds
    with pytest.raises(UserError, match="data.image_size = 32: tfds:tiny_pictures has images of 16 x 16"):
        opened("tfds:tiny_pictures", directory)
    with pytest.raises(UserError, match="data.dir = .*: holds no prepared tiny_pictures; prepare it with"):
        opened("tfds:tiny_pictures", tmp_path)
    with pytest.raises(UserError, match="no such folder"):
        opened("tfds:tiny_pictures", tmp_path / "nothing")
    with pytest.raises(UserError, match="data.source = tfds:no_such_set: no such data set; .* holds tiny_pictures"):
        opened("tfds:no_such_set", directory)
    with pytest.raises(UserError, match="data.num_train = 7: the data has 6 images"):
        opened("tfds:tiny_pictures", directory, image_size=16, num_train=7)


def test_tfds_looks_where_tfds_prepares_by_default(prepared_tfds, monkeypatch):
    directory, _ = prepared_tfds
    monkeypatch.setattr("tensorflow_datasets.core.constants.DATA_DIR", str(directory))
    assert len(opened("tfds:tiny_pictures", "", image_size=16)) == 6
