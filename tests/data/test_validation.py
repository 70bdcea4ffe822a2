"""What is held out of training: whole groups, the same ones everywhere, and never in a training batch."""

import pickle

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jepa_jax.base.errors import UserError
from jepa_jax.config.groups import DataConfig
from jepa_jax.data.batches import SampleOrder
from jepa_jax.data.contract import Bucketed, Grouped
from jepa_jax.data.facts import data_facts
from jepa_jax.data.pipeline import train_batches
from jepa_jax.data.sources import hold_out, open_data, open_source, open_splits
from jepa_jax.data.subset import subset
from tests.tiny import tiny_config

STEPS = 8


def sequences(**keys):
    wanted = dict(
        source="tests.sequences:PaddedSequences", image_size=16, num_train=44, num_test=4, batch_size=4, max_frames=8
    )
    return DataConfig(**wanted | dict(frame_buckets=(3,), validation=0.25) | keys)


def images(**keys):
    return DataConfig(**dict(source="shapes", image_size=8, num_train=50, num_test=4, batch_size=8) | keys)


def ids(source):
    return source.batch(np.arange(len(source)))["recording"]


def batches_of(data, start_step=0, steps=STEPS):
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])
    sharding, source = NamedSharding(mesh, PartitionSpec("data")), open_splits(data)[0]
    with train_batches(data, source, seed=3, sharding=sharding, start_step=start_step) as batches:
        return [jax.device_get(next(batches)[0]) for _ in range(steps)]


def test_whole_groups_are_held_out():
    train, _, validation = open_data(sequences())
    assert len(train) + len(validation) == 44
    assert set(ids(train)).isdisjoint(ids(validation)) and len(set(ids(validation))) == 3  # of 11 recordings
    np.testing.assert_array_equal(train.groups, ids(train))
    np.testing.assert_array_equal(open_source(sequences(), "validation").groups, ids(validation))


def test_elements_are_held_out_where_there_are_no_groups():
    whole, (train, _, validation) = open_source(images(), "train"), open_data(images(validation=0.2))
    assert (len(train), len(validation)) == (40, 10)
    assert sorted([*train.groups, *validation.groups]) == list(range(50))
    np.testing.assert_array_equal(validation.groups, open_source(images(validation=0.2), "validation").groups)
    for part in (train, validation):
        np.testing.assert_array_equal(part.batch(np.array([2]))["image"], whole.batch(part.groups[[2]])["image"])


@pytest.mark.usefixtures("quick_workers")
@pytest.mark.parametrize(
    "data", [sequences(), sequences(frame_buckets=()), sequences(pipeline="device"), sequences(num_workers=1)]
)
def test_no_batch_has_what_is_held_out(data):
    held_out = set(ids(open_source(data, "validation")))
    batches = batches_of(data)
    assert held_out.isdisjoint(np.concatenate([batch["recording"] for batch in batches]))
    order = SampleOrder(32, 4, 3, open_source(data, "train").buckets)
    for n, batch in enumerate(batches):  # the same samples whoever loads them
        np.testing.assert_array_equal(batch["recording"], ids(open_source(data, "train"))[order[n]])
    for one, resumed in zip(batches[5:], batches_of(data, start_step=5, steps=3), strict=True):
        jax.tree.map(np.testing.assert_array_equal, one, resumed)


def test_parts_keep_buckets_and_groups_and_can_be_pickled():
    train, _, validation = open_data(sequences())
    whole = open_source(sequences(validation=0.0), "train")
    for part in (train, validation, subset(train, np.array([3, 1]))):
        copy = pickle.loads(pickle.dumps(part))
        assert isinstance(copy, Bucketed) and isinstance(copy, Grouped) and len(copy) == len(part)
        np.testing.assert_array_equal(copy.buckets, part.buckets)
    short = np.flatnonzero(validation.buckets == 0)[:1]
    batch = validation.in_bucket(0).batch(short)
    assert batch["frames"].shape[1] == 3 == validation.in_bucket(0).spec["frames"].shape[0]
    np.testing.assert_array_equal(batch["frames"], validation.batch(short)["frames"][:, -3:])
    assert len(pickle.dumps(train)) < 4000 + len(pickle.dumps(whole))  # no data goes to the workers
    assert not isinstance(subset(open_source(images(), "train"), np.array([0])), Bucketed)


def test_facts_count_what_is_trained_on():
    assert data_facts(sequences()).num_train == len(open_splits(sequences())[0]) == 32
    absent = DataConfig(source="cifar10", dir="/nowhere", validation=0.1)
    assert data_facts(absent).num_train == 45_000


def test_one_group_cannot_be_divided_and_a_small_share_is_one_group():
    with pytest.raises(UserError, match=r"config.data.validation = 0.25: .*one group"):
        open_data(sequences(num_train=4))
    with pytest.raises(UserError, match=r"config.data.validation = 0: nothing is held out"):
        open_source(images(), "validation")
    train, validation = hold_out(open_source(images(num_train=3), "train"), 0.01)
    assert (len(train), len(validation)) == (2, 1)


def test_an_image_that_stands_in_for_another_could_be_of_the_other_part():
    with pytest.raises(UserError, match=r"config.data.on_error = 'skip'"):
        tiny_config(data__validation=0.1, data__on_error="skip")
