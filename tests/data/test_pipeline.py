"""Batches are a pure function of (seed, step): the same from any pipeline, any number of workers, after any resume."""

import threading
import time
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from PIL import Image

from jepa_jax.base.errors import UserError
from jepa_jax.data import pipeline
from jepa_jax.data.pipeline import BatchPlan, eval_batches, train_batches
from jepa_jax.data.sources import open_source

N, BATCH = 50, 16


def config(**kwargs):
    keys = {
        "source": "shapes",
        "dir": "",
        "image_size": 8,
        "num_train": N,
        "num_test": 20,
        "seed": 0,
        "on_error": "refuse",
    }
    keys |= {"batch_size": BATCH, "num_workers": 0, "prefetch": 2, "pipeline": "grain"}
    return SimpleNamespace(**keys | kwargs)


def over_batch(devices=8):
    mesh = jax.make_mesh((devices,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])
    return NamedSharding(mesh, PartitionSpec("data"))


def host(batch):
    return np.asarray(batch["image"]), np.asarray(batch["label"])


def take(iterator, count):
    return [host(next(iterator)[0]) for _ in range(count)]


def expected(source, seed, steps):
    plan = BatchPlan(len(source), BATCH, seed)
    return [(b["image"], b["label"]) for b in (source.batch(plan.indices(n)) for n in steps)]


def assert_equal(got, wanted):
    assert len(got) == len(wanted)
    for (image, label), (wanted_image, wanted_label) in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(image, wanted_image)
        np.testing.assert_array_equal(label, wanted_label)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 60), st.integers(1, 60), st.integers(0, 2**40), st.integers(0, 5))
def test_an_epoch_visits_each_sample_at_most_once(num_samples, batch_size, seed, epoch):
    batch_size = min(batch_size, num_samples)
    plan = BatchPlan(num_samples, batch_size, seed)
    steps = range(epoch * plan.steps_per_epoch, (epoch + 1) * plan.steps_per_epoch)
    seen = np.concatenate([plan.indices(n) for n in steps])
    assert len(seen) == num_samples // batch_size * batch_size == len(set(seen.tolist()))
    assert seen.min() >= 0 and seen.max() < num_samples
    again = BatchPlan(num_samples, batch_size, seed)
    np.testing.assert_array_equal(plan.indices(steps[-1]), again.indices(steps[-1]))


def test_epochs_and_seeds_are_shuffled_differently():
    plan = BatchPlan(1000, 1000, 0)
    orders = [plan.indices(0), plan.indices(1), BatchPlan(1000, 1000, 1).indices(0), np.arange(1000)]
    for i, a in enumerate(orders):
        for b in orders[:i]:
            assert (a == b).mean() < 0.05


@pytest.mark.parametrize("name", ["grain", "device"])
def test_batches_follow_the_plan_and_resume_exactly(name):
    settings_, sharding = config(pipeline=name), over_batch()
    source = open_source(settings_, "train")
    wanted = expected(source, seed=7, steps=range(8))  # 3 steps an epoch
    with train_batches(settings_, source, seed=7, sharding=sharding) as batches:
        batch, info = next(batches)
        assert batch["image"].sharding == sharding and batch["image"].dtype == np.uint8
        assert batch["label"].sharding == sharding and batch["label"].dtype == np.int32
        assert batch["image"].addressable_shards[3].data.shape == (2, 8, 8, 3)
        assert_equal([host(batch)], wanted[:1])
        assert set(info) == {"generation_seconds", "supply_seconds", "transfer_seconds", "wait_seconds", "skipped"}
        assert info["skipped"] == [] and info["generation_seconds"] > 0 and info["wait_seconds"] > 0
        assert_equal(take(batches, 2), wanted[1:3])
        assert batches.get_state() == 3  # what was prefetched does not count
        batches.set_state(6)
        assert_equal(take(batches, 2), wanted[6:])
    with train_batches(settings_, source, seed=7, sharding=sharding, start_step=5) as batches:
        assert batches.get_state() == 5
        assert_equal(take(batches, 3), wanted[5:])


def write_photos(tmp_path, count=24):
    for i in range(count):
        file = tmp_path / "train" / "ab"[i % 2] / f"{i}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (10, 12), (10 * i, i, 0)).save(file)
    return config(source="folder", dir=str(tmp_path), num_train=0, batch_size=8)


def test_workers_change_nothing_and_report_skipped_files(tmp_path):
    settings_ = write_photos(tmp_path)
    settings_.on_error = "skip"
    broken = tmp_path / "train" / "b" / "5.png"
    broken.write_bytes(b"not an image")
    source, sharding = open_source(settings_, "train"), over_batch()
    results, skipped = {}, {}
    for workers in (0, 2):
        settings_.num_workers = workers
        with train_batches(settings_, source, seed=1, sharding=sharding, start_step=2) as batches:
            steps = [next(batches) for _ in range(6)]
        results[workers] = [host(batch) for batch, _ in steps]
        skipped[workers] = [info["skipped"] for _, info in steps]
        assert all(info["generation_seconds"] > 0 for _, info in steps)
    assert_equal(results[2], results[0])
    assert skipped[2] == skipped[0]
    assert [name for names in skipped[0] for name in names] == [str(broken)] * 2  # once an epoch of 3 steps


@pytest.mark.parametrize("workers", [0, 1])
def test_errors_of_the_loader_surface_with_their_message(tmp_path, workers):
    settings_ = write_photos(tmp_path)
    settings_.num_workers = workers
    source = open_source(settings_, "train")
    broken = tmp_path / "train" / "a" / "2.png"
    broken.write_bytes(b"not an image")
    with train_batches(settings_, source, seed=1, sharding=over_batch()) as batches:
        for _ in range(2):  # and again when asked again, instead of waiting for ever
            with pytest.raises(UserError, match=f"{broken}: cannot be read as an image"):
                for _ in range(3):
                    next(batches)


class CountingSource:
    """Plain batches, and how many of them were asked for."""

    classes, image_shape = ("x",), (8, 8, 3)
    calls = 0

    def __len__(self):
        return N

    def batch(self, indices):
        self.calls += 1
        return {"image": np.zeros((len(indices), 8, 8, 3), np.uint8), "label": np.asarray(indices, np.int32)}


def test_batches_are_made_ahead_while_the_device_computes():
    source = CountingSource()
    with train_batches(config(prefetch=3), source, seed=0, sharding=over_batch()) as batches:
        next(batches)
        give_up = time.monotonic() + 20
        while source.calls < 4 and time.monotonic() < give_up:
            time.sleep(0.01)
        assert source.calls >= 4
        time.sleep(0.2)
        assert source.calls <= 5  # three are ready and one is held until there is room; no more


def test_close_ends_the_thread_and_can_be_repeated():
    before = threading.active_count()
    batches = train_batches(config(), CountingSource(), seed=0, sharding=over_batch())
    assert threading.active_count() == before  # nothing starts before the first batch
    first = host(next(batches)[0])
    batches.close()
    batches.close()
    assert threading.active_count() == before
    batches.set_state(0)
    assert_equal(take(batches, 1), [first])
    batches.close()


@pytest.mark.parametrize("name", ["grain", "device"])
def test_processes_load_disjoint_slices(name, monkeypatch):
    """With two processes, each hands its half of the global batch to jax, in order."""
    handed = []
    assemble = jax.make_array_from_process_local_data

    def record(sharding, data):
        handed.append(np.asarray(data))
        return assemble(sharding, data)

    source = open_source(config(), "train")
    halves = []
    for process in range(2):
        with train_batches(
            config(pipeline=name), source, seed=2, sharding=over_batch(), process_index=process, process_count=2
        ) as batches:
            if name == "device":  # the set is on every device, so a process needs no slice: the gather is global
                halves.append(host(next(batches)[0]))
                continue
            handed.clear()
            monkeypatch.setattr(jax, "make_array_from_process_local_data", record)
            next(batches)
            halves.append(tuple(handed[:2]))
            monkeypatch.setattr(jax, "make_array_from_process_local_data", assemble)
    wanted = expected(source, 2, [0])
    if name == "device":
        assert_equal(halves, wanted * 2)
    else:
        assert_equal([tuple(np.concatenate(parts) for parts in zip(*halves, strict=True))], wanted)


def test_eval_batches_cover_the_split_in_order_with_static_shapes():
    source = open_source(config(), "test")
    whole = source.batch(np.arange(20))
    batches = [(host(batch), n) for batch, n in eval_batches(source, 8, over_batch())]
    assert [n for _, n in batches] == [8, 8, 4]
    assert {image.shape for (image, _), _ in batches} == {(8, 8, 8, 3)}
    for key, position in (("image", 0), ("label", 1)):
        np.testing.assert_array_equal(np.concatenate([b[position][:n] for b, n in batches]), whole[key])
    [(batch, n)] = eval_batches(source, 64, over_batch())  # larger than the split: repeated as often as needed
    assert n == 20
    np.testing.assert_array_equal(host(batch)[1], np.resize(whole["label"], 64))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 5000}, "data.batch_size = 5000: the train split has 50 images; use data.batch_size <= 50"),
        ({"batch_size": 0}, "data.batch_size = 0: must be at least 1"),
        ({"pipeline": "tf.data"}, "data.pipeline = tf.data: unknown; use one of grain, device"),
        ({"num_workers": -1}, "data.num_workers = -1: must be at least 0"),
        ({"prefetch": 0}, "data.prefetch = 0: must be at least 1"),
    ],
)
def test_impossible_values_are_refused(change, message):
    with pytest.raises(UserError, match=message):
        train_batches(config(**change), CountingSource(), seed=0, sharding=over_batch())


def test_batch_must_divide_by_processes_and_devices():
    with pytest.raises(UserError, match="data.batch_size = 15: not divisible by 2 processes"):
        train_batches(config(batch_size=15), CountingSource(), seed=0, sharding=over_batch(), process_count=2)
    with pytest.raises(UserError, match="data.batch_size = 20: not divisible by 8 devices; use a multiple of 8"):
        train_batches(config(batch_size=20), CountingSource(), seed=0, sharding=over_batch())
    with pytest.raises(UserError, match="eval.batch_size = 20: not divisible by 8 devices; use a multiple of 8"):
        next(eval_batches(CountingSource(), 20, over_batch()))


def test_a_set_too_large_for_the_device_is_refused():
    device = SimpleNamespace(memory_stats=lambda: {"bytes_limit": 2**30})
    sharding = SimpleNamespace(addressable_devices=[device])
    pipeline._require_room(2**28, sharding)
    with pytest.raises(UserError, match="takes 0.8 of the device's 1.0 GiB; use data.pipeline = grain"):
        pipeline._require_room(3 * 2**28, sharding)
