"""Buckets by length: batches of few shapes, whose order and content stay a pure function of (seed, step)."""

import concurrent.futures
import pickle

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jepa_jax.base.errors import UserError
from jepa_jax.config.groups import DataConfig
from jepa_jax.data.batches import SampleOrder, batch_dataset
from jepa_jax.data.facts import BucketFacts, bucket_facts, data_facts
from jepa_jax.data.pipeline import bucket_specs, train_batches
from jepa_jax.data.sources import open_source
from jepa_jax.projects.wildfire.data.element import fire_spec

LIMITS = (3, 8, 12)
BATCH = 4


def config(**keys):
    wanted = dict(
        source="wildfire", image_size=16, num_train=42, batch_size=BATCH, max_frames=12, frame_buckets=LIMITS[:2]
    )
    return DataConfig(**wanted | keys)


def dataset(**parts):
    return batch_dataset(open_source(config(), "train"), BATCH, seed=5, **parts)


@settings(max_examples=30)
@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 9), st.integers(0, 2**40), st.integers(0, 3)
)
def test_an_epoch_has_each_sample_once_in_batches_of_one_bucket(buckets, batch_size, seed, epoch):
    buckets, batch_size = np.array(buckets), min(batch_size, len(buckets))
    order, again = (SampleOrder(len(buckets), batch_size, seed, buckets) for _ in range(2))
    per_epoch = len(buckets) // batch_size
    steps = range(epoch * per_epoch, (epoch + 1) * per_epoch)
    batches = [order[n] for n in steps]
    seen = np.concatenate(batches)
    assert len(set(seen.tolist())) == len(seen) == per_epoch * batch_size
    assert sum(len(set(buckets[batch])) > 1 for batch in batches) < len(set(buckets.tolist()))
    for n, batch in reversed(list(zip(steps, batches, strict=True))):  # in any order of asking
        np.testing.assert_array_equal(again[n], batch)


def epoch_by_definition(buckets, batch_size, seed, epoch):
    """Returns the batches of an epoch: a permutation sorted by bucket, cut into batches, and these permuted."""
    steps = len(buckets) // batch_size
    order = np.random.default_rng([seed, epoch]).permutation(len(buckets))[: steps * batch_size]
    batches = order[np.argsort(buckets[order], kind="stable")].reshape(steps, batch_size)
    return np.random.default_rng([seed, epoch, 1]).permutation(batches)


def test_epochs_are_sorted_once_and_stay_what_they_were_in_any_thread_and_process(monkeypatch):
    buckets = np.random.default_rng(0).integers(0, 3, 200)
    order, sorts = SampleOrder(200, 8, 7, buckets), []
    monkeypatch.setattr(
        SampleOrder, "_order", lambda self, epoch, true=SampleOrder._order: sorts.append(epoch) or true(self, epoch)
    )
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda n: order[n], range(75)))
    expected = np.concatenate([epoch_by_definition(buckets, 8, 7, epoch) for epoch in range(3)])
    np.testing.assert_array_equal(found, expected)
    again = pickle.loads(pickle.dumps(order))  # without what it remembers
    sorts.clear()
    np.testing.assert_array_equal([again[n] for n in range(24, 75)], expected[24:])
    assert sorts == [0, 1, 2]
    with pytest.raises(ValueError, match="read-only"):
        again[74][0] = 0


def test_batches_have_the_shortest_length_that_holds_them():
    batches, whole, shapes = dataset(), open_source(config(), "train"), set()
    order = SampleOrder(len(whole), BATCH, 5, whole.buckets)
    for step in range(len(whole) // BATCH):
        batch, capped = batches[step], whole.batch(order[step])
        frames, longest = batch["fire"].shape[1], capped["valid"].sum(1).max()
        assert frames == min(limit for limit in LIMITS if limit >= longest)
        for key in capped:
            kept = capped[key][:, -frames:] if key in ("fire", "wind", "valid") else capped[key]
            np.testing.assert_array_equal(batch[key], kept, err_msg=key)
        shapes.add(frames)
    assert shapes == set(LIMITS)


def test_processes_load_parts_of_one_shape():
    whole, halves = dataset(), [dataset(process_index=i, process_count=2) for i in range(2)]
    for step in range(6):
        parts = [half[step] for half in halves]
        for key, array in whole[step].items():
            np.testing.assert_array_equal(array, np.concatenate([part[key] for part in parts]))


def test_a_run_resumes_in_the_same_buckets():
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])
    sharding, source = NamedSharding(mesh, PartitionSpec("data")), open_source(config(), "train")
    with train_batches(config(), source, seed=5, sharding=sharding, start_step=9) as batches:
        for step in (9, 10, 11, 12):
            jax.tree.map(np.testing.assert_array_equal, jax.device_get(next(batches)[0]), dataset()[step])


@pytest.mark.parametrize("lengths", [(8, 3), (3, 3), (3, 12), (20,)])
def test_lengths_must_ascend_below_the_cap(lengths):
    with pytest.raises(UserError, match="data.frame_buckets = .*ascending lengths below data.max_frames = 12"):
        open_source(config(frame_buckets=lengths), "train")


def test_the_shapes_of_batches_are_known_beforehand():
    source = open_source(config(), "train")
    assert [spec["fire"].shape[0] for spec in bucket_specs(config(), source)] == list(LIMITS)
    assert bucket_specs(config(pipeline="device"), source) == [source.spec]


@pytest.mark.parametrize("source", ["fire_sequences", "ndws"])
def test_absent_fires_are_assumed_as_histories(source):
    absent = DataConfig(source=source, dir="nowhere", image_size=16, channels=5, max_frames=7)
    facts = data_facts(absent, assume=True)
    assert (facts.num_train, facts.num_classes, facts.found) == (50_000, 0, False)
    assert facts.spec == fire_spec(16, 5, 7)


def test_buckets_of_absent_fires_are_known_but_not_their_shares():
    absent = dict(dir="nowhere", image_size=16, channels=5, max_frames=7, frame_buckets=(3,))
    expected = [BucketFacts(fire_spec(16, 5, frames), None) for frames in (3, 7)]
    assert bucket_facts(DataConfig(source="fire_sequences", **absent)) == expected
    assert bucket_facts(DataConfig(source="ndws", **absent)) == []
