"""Shards hold what the folder held, and any damage is named."""

import json
import pickle

import numpy as np
import pytest

from jepa_jax.base.errors import UserError
from jepa_jax.config.augment import CropConfig, Crops
from jepa_jax.config.groups import DataConfig
from jepa_jax.data.photos.decode import Photo
from jepa_jax.data.readers.shards import _smaller, verify_shards, write_shards
from jepa_jax.data.sources import open_source, open_splits
from tests.data.photos.pictures import write_photos

CROPS = {"crops": Crops(2, 16, CropConfig())}


def settings(source, place, **more):
    return DataConfig(source=source, dir=str(place), image_size=16, **more)


def packed(tmp_path, classes=2, **options):
    write_photos(tmp_path / "photos", 40, classes)
    data = settings("folder", tmp_path / "photos")
    sources = {split: open_source(data, split) for split in ("train", "test")}
    return sources, write_shards(sources, tmp_path / "shards", **options)


@pytest.mark.parametrize("classes", [2, 0])
def test_shards_give_the_images_labels_and_crops_of_the_folder(tmp_path, classes):
    sources, manifest = packed(tmp_path, classes, shard_bytes=5000)
    assert len(manifest["splits"]["train"]) > 2
    for split, folder in sources.items():
        shards = open_source(settings("shards", tmp_path / "shards"), split)
        assert (shards.spec, shards.classes, len(shards)) == (folder.spec, folder.classes, len(folder))
        order = np.random.default_rng(0).permutation(len(folder))
        for one, other in ((shards, folder), (shards.cropped(CROPS, 3, 1), folder.cropped(CROPS, 3, 1))):
            batch, expected = one.batch(order), other.batch(order)
            for name in other.spec:
                np.testing.assert_array_equal(batch[name], expected[name])
        again = pickle.loads(pickle.dumps(shards))
        np.testing.assert_array_equal(again.batch(order)["image"], shards.batch(order)["image"])
    assert verify_shards(tmp_path / "shards") == sum(map(len, manifest["splits"].values()))
    assert len(open_source(settings("shards", tmp_path / "shards", num_train=7), "train")) == 7


def test_damaged_shards_are_named(tmp_path):
    packed(tmp_path)
    root = tmp_path / "shards"
    with pytest.raises(UserError, match=r"no manifest.json there; make shards .* jepa-jax prepare-data shards"):
        open_source(settings("shards", tmp_path), "train")
    with pytest.raises(UserError, match="manifest.json: exists; remove the folder"):
        write_shards({}, root)
    shard = next(root.glob("train-*"))
    good = shard.read_bytes()
    shard.write_bytes(good[:-3])
    with pytest.raises(UserError, match=f"{shard.name}: .* bytes, manifest.json says"):
        open_splits(settings("shards", root))
    flipped = bytearray(good)
    flipped[len(good) // 2] ^= 255
    shard.write_bytes(bytes(flipped))
    with pytest.raises(UserError, match=f"{shard.name}: its SHA-256 is not that of manifest.json"):
        verify_shards(root)
    shard.unlink()
    with pytest.raises(UserError, match=f"{shard.name}: cannot be read"):
        open_source(settings("shards", root), "train")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update(format="other"), "format 'other'"),
        (lambda m: m.pop("splits"), "KeyError"),
        (lambda m: m["splits"]["train"][0]["labels"].pop(), "labels of .* do not fit"),
        (lambda m: m["splits"]["train"][0]["labels"].__setitem__(0, 9), "labels of .* do not fit"),
        (lambda m: m["splits"]["train"][0].update(images=2**60), "1152921504606846976 images in"),
        (lambda m: m["splits"]["train"][0].update(images=-1), "-1 images in"),
        (lambda m: m["splits"]["train"][0].update(images=True), "is of another kind"),
        (lambda m: m["splits"]["train"][0].update(images=1.5), "is of another kind"),
        (lambda m: m["splits"]["train"][0].update(bytes="1"), "is of another kind"),
        (lambda m: m["splits"]["train"][0].update(sha256=None), "is of another kind"),
        (lambda m: m["splits"]["train"][0].update(file=7), "is of another kind"),
        (lambda m: m["splits"].update(train={"a": 1}), "TypeError"),
        (lambda m: m["splits"].update(train=[1]), "TypeError"),
        (lambda m: m.update(classes=None), "classes are no list of names"),
        (lambda m: m.update(classes=[0, 1]), "classes are no list of names"),
    ],
)
def test_a_damaged_manifest_is_refused(tmp_path, change, message):
    _, manifest = packed(tmp_path)
    change(manifest)
    (tmp_path / "shards" / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=f"manifest.json: damaged .*{message}"):
        open_source(settings("shards", tmp_path / "shards"), "train")


def test_larger_images_are_resized_and_small_or_damaged_ones_stay(tmp_path):
    sources, manifest = packed(tmp_path, shorter_side=20)
    assert verify_shards(tmp_path / "shards") == sum(map(len, manifest["splits"].values()))
    shards = open_source(settings("shards", tmp_path / "shards"), "train")
    resized = 0
    for index, content in enumerate(map(sources["train"].content, range(len(shards)))):
        before, after = Photo(content, 3).size, Photo(shards.content(index), 3).size
        resized += min(before) > 20
        assert min(after) == min(20, min(before))
        assert after[0] / after[1] == pytest.approx(before[0] / before[1], rel=0.06)
    assert resized
    assert _smaller(b"no image", 3, 20) == b"no image"
