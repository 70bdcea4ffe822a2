"""What is known of a data set without its files, and the data drawn in its place."""

import pickle

import jax
import numpy as np
import pytest

from jepa_jax.base.errors import UserError
from jepa_jax.config.groups import DataConfig
from jepa_jax.data.contract import abstract_batch, element_bytes, image_spec
from jepa_jax.data.dummy import DummySource, open_dummy
from jepa_jax.data.facts import BucketFacts, DataFacts, bucket_facts, data_facts
from tests.sequences import SequenceSource, padded_spec

PADDED = "tests.sequences:PaddedSequences"


def config(source, directory="nowhere", **kwargs):
    return DataConfig(source=source, dir=str(directory), image_size=16, **kwargs)


def test_facts_come_from_the_files_where_they_are(tmp_path):
    np.savez(tmp_path / "train.npz", image=np.zeros((7, 16, 16, 4), np.uint8))
    assert data_facts(config("npz", tmp_path, channels=4)) == DataFacts(7, 0, image_spec(16, 4, labelled=False))
    assert data_facts(config("shapes", num_train=30)) == DataFacts(30, 10, image_spec(16))


def test_facts_of_absent_sets_are_known_or_assumed():
    assert data_facts(config("cifar10")) == DataFacts(50_000, 10, image_spec(16), found=False)
    known = data_facts(config("tfds:imagenet2012"), assume=True)
    assert (known.num_train, known.num_classes, known.found) == (1_281_167, 1000, False)
    assert data_facts(config("cifar10", num_train=500)).num_train == 500
    with pytest.raises(UserError, match="no such file or folder"):
        data_facts(config("npz"))
    assert data_facts(config("npz", channels=1), assume=True) == DataFacts(50_000, 10, image_spec(16, 1), found=False)


def test_absent_sequences_have_the_spec_that_their_class_expects():
    facts = data_facts(config(PADDED, max_frames=7), assume=True)
    assert (facts.num_train, facts.num_classes, facts.found) == (50_000, 0, False)
    assert facts.spec == padded_spec(16, 7)


def test_buckets_of_absent_sequences_are_known_but_not_their_shares():
    lengths = config(PADDED, max_frames=7, frame_buckets=(3,))
    assert bucket_facts(lengths) == [BucketFacts(padded_spec(16, frames), None) for frames in (3, 7)]
    assert bucket_facts(config("npz")) == []


def test_sizes_of_elements_and_batches():
    assert element_bytes(image_spec(16, 4)) == 16 * 16 * 4 + 4
    shapes = abstract_batch(SequenceSource.spec, 6)
    assert {key: one.shape for key, one in shapes.items()} == {"frames": (6, 4, 3, 5), "length": (6,)}


def test_dummy_images_are_drawn_by_whoever_loads_the_batch():
    source = open_dummy(config("cifar10"), "train")
    assert (len(source), source.spec, len(source.classes)) == (50_000, image_spec(16), 10)
    assert len(open_dummy(config("cifar10", num_test=300), "test")) == 300
    assert len(pickle.dumps(source)) < 1000  # a worker draws; nothing is shipped to it
    batch = pickle.loads(pickle.dumps(source)).batch(np.arange(8))
    assert batch["image"].shape == (8, 16, 16, 3) and batch["image"].std() > 10


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_dummy_images_of_any_size_and_channels(channels):
    few = DummySource(image_spec(6, channels), 100, num_classes=3, split="test").batch(np.arange(20))
    assert few["image"].shape == (20, 6, 6, channels) and few["image"].std() > 10
    assert set(few["label"]) == {0, 1, 2}


def test_dummy_elements_of_any_spec():
    spec = {
        **SequenceSource.spec,
        "mask": jax.ShapeDtypeStruct((9,), bool),
        "video": jax.ShapeDtypeStruct((2, 5, 5, 3), np.uint8),
    }
    source = DummySource(spec, 50, num_classes=0, split="train")
    assert source.classes == ()
    batch = source.batch(np.arange(12))
    assert {key: (array.shape, array.dtype) for key, array in batch.items()} == {
        key: (one.shape, one.dtype) for key, one in abstract_batch(spec, 12).items()
    }
    assert 0 <= batch["frames"].min() < 0.1 and 0.9 < batch["frames"].max() < 1
    assert set(batch["length"]) == {0, 1} and batch["mask"].any() and not batch["mask"].all()
    assert batch["video"].max() > 250
    np.testing.assert_array_equal(source.batch(np.arange(12))["frames"], batch["frames"])
    assert not np.array_equal(source.batch(np.arange(12, 24))["frames"], batch["frames"])


def test_sizes_are_not_assumed_for_a_name_that_nobody_knows():
    with pytest.raises(UserError, match="config.data.source = 'cifar11'"):
        data_facts(DataConfig(source="cifar11"), assume=True)
