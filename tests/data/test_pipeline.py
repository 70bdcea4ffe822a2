"""Batches are a pure function of (seed, step): the same from any pipeline, any number of workers, after any resume."""

import dataclasses
import threading
from types import SimpleNamespace

import grain
import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from PIL import Image

import jepa_jax
from jepa_jax.base.errors import UserError
from jepa_jax.config.augment import AugmentConfig
from jepa_jax.config.groups import DataConfig
from jepa_jax.data import pipeline
from jepa_jax.data.augment import augment_views
from jepa_jax.data.batches import SampleOrder, batch_dataset
from jepa_jax.data.contract import abstract_batch, image_spec
from jepa_jax.data.pipeline import eval_batches, load_batches, train_batches
from jepa_jax.data.sources import open_source
from tests.sequences import SequenceSource
from tests.tiny import tiny_config

pytestmark = pytest.mark.usefixtures("quick_workers")
N, BATCH = 50, 16
INFO = {"generation_seconds", "supply_seconds", "transfer_seconds", "wait_seconds", "skipped"}


def config(**kwargs):
    return DataConfig(**{"image_size": 8, "num_train": N, "num_test": 20, "batch_size": BATCH} | kwargs)


def sequences(split="train"):
    return SequenceSource(config(), split)


def over_batch(devices=8):
    mesh = jax.make_mesh((devices,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])
    return NamedSharding(mesh, PartitionSpec("data"))


def take(iterator, count):
    return [jax.device_get(next(iterator)[0]) for _ in range(count)]


def expected(source, seed, steps):
    order = SampleOrder(len(source), BATCH, seed)
    return [source.batch(order[n]) for n in steps]


def assert_equal(got, wanted):
    jax.tree.map(np.testing.assert_array_equal, got, wanted)


@settings(max_examples=25)
@given(st.integers(1, 60), st.integers(1, 60), st.integers(0, 2**40), st.integers(0, 5))
def test_an_epoch_visits_each_sample_at_most_once(num_samples, batch_size, seed, epoch):
    batch_size = min(batch_size, num_samples)
    order, per_epoch = SampleOrder(num_samples, batch_size, seed), num_samples // batch_size
    steps = range(epoch * per_epoch, (epoch + 1) * per_epoch)
    seen = np.concatenate([order[n] for n in steps])
    assert len(seen) == num_samples // batch_size * batch_size == len(set(seen.tolist()))
    assert seen.min() >= 0 and seen.max() < num_samples
    np.testing.assert_array_equal(order[steps[-1]], SampleOrder(num_samples, batch_size, seed)[steps[-1]])


@settings(max_examples=25)
@given(st.integers(1, 4), st.integers(1, 5), st.integers(0, 30), st.integers(0, 2**40))
def test_processes_load_slices_that_make_up_the_batch(processes, per_process, step, seed):
    source, size = sequences(), processes * per_process
    parts = [
        batch_dataset(source, size, seed=seed, process_index=index, process_count=processes)[step]
        for index in range(processes)
    ]
    whole = jax.tree.map(lambda *arrays: np.concatenate(arrays), *parts)
    assert_equal(whole, source.batch(SampleOrder(50, size, seed)[step]))


def test_the_order_is_the_one_that_grain_shuffles():
    word = int(np.random.SeedSequence(5).generate_state(1)[0])
    shuffled = grain.MapDataset.range(1000).seed(word).shuffle()
    shuffled = shuffled.batch(7, drop_remainder=True, batch_fn=np.asarray).repeat()
    for n in (0, 1, 141, 142, 999):
        np.testing.assert_array_equal(SampleOrder(1000, 7, 5)[n], shuffled[n])


def test_epochs_and_seeds_are_shuffled_differently():
    first, second = SampleOrder(1000, 1000, 0), SampleOrder(1000, 1000, 1)
    orders = [first[0], first[1], second[0], second[1], np.arange(1000)]
    for i, a in enumerate(orders):
        for b in orders[:i]:
            assert (a == b).mean() < 0.05


@pytest.mark.parametrize("kind", ["images", "sequences"])
@pytest.mark.parametrize("name", ["grain", "device"])
def test_batches_follow_the_plan_and_resume_exactly(name, kind):
    settings_, sharding = config(pipeline=name), over_batch()
    source = open_source(settings_, "train") if kind == "images" else sequences()
    wanted = expected(source, seed=7, steps=range(8))  # 3 steps per epoch
    with train_batches(settings_, source, seed=7, sharding=sharding) as batches, jax.transfer_guard("disallow"):
        batch, info = next(batches)
        assert jax.eval_shape(lambda batch: batch, batch) == abstract_batch(source.spec, BATCH)
        for array in batch.values():
            assert array.sharding == sharding and len(array.addressable_shards[3].data) == 2
        assert set(info) - {"state"} == INFO
        assert info["skipped"] == [] and min(info["generation_seconds"], info["wait_seconds"]) >= 0
        assert_equal([jax.device_get(batch), *take(batches, 4)], wanted[:5])
    with train_batches(settings_, source, seed=7, sharding=sharding, start_step=5) as batches:
        assert_equal(take(batches, 3), wanted[5:])


def test_the_dataset_of_a_config_is_what_steps_see():
    config = tiny_config(data__num_workers=2, train__seed=2**31 - 1)
    batches = jepa_jax.dataset(config, "train")
    assert isinstance(batches, grain.MapDataset)
    extended = batches.map(lambda batch: batch["label"].sum())
    source, sharding = open_source(config.data, "train"), over_batch()
    with train_batches(config.data, source, seed=2**31 - 1, sharding=sharding, start_step=7) as loaded:
        for n in (7, 8, 9):
            batch = jax.device_get(next(loaded)[0])
            assert_equal(batch, batches[n])
            assert extended[n] == batch["label"].sum()
    size, count = config.data.batch_size, len(source)
    assert str(batches).splitlines() == [
        f"BatchDataset of ShapesSource, {count} elements, {count // size} batches per epoch, endless; [n] is batch n:",
        f"  image uint8[{size}, 16, 16, 3]",
        f"  label int32[{size}]",
    ]


def test_a_dataset_of_ones_own_is_loaded_to_its_end():
    batches = grain.MapDataset.range(12).map(lambda n: {"x": np.full((8, 2), n)}).batch(2)
    batches = batches.map(lambda batch: {"x": batch["x"].reshape(16, 2)})
    for workers in (0, 2):
        with load_batches(batches, sharding=over_batch(), start=1, num_workers=workers) as loaded:
            assert [int(batch["x"].sum()) for batch, _ in loaded] == [16 * (2 * n + 2 * n + 1) for n in range(1, 6)]


def write_photos(tmp_path, count=24, **changes):
    for i in range(count):
        file = tmp_path / "train" / "ab"[i % 2] / f"{i}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (10, 12), (10 * i, i, 0)).save(file)
    return config(source="folder", dir=str(tmp_path), num_train=0, batch_size=8, **changes)


def test_workers_change_nothing_and_report_skipped_files(tmp_path):
    settings_ = write_photos(tmp_path, on_error="skip")
    broken = tmp_path / "train" / "b" / "5.png"
    broken.write_bytes(b"not an image")
    source, sharding = open_source(settings_, "train"), over_batch()
    results, skipped = {}, {}
    for workers in (0, 2):
        with train_batches(
            dataclasses.replace(settings_, num_workers=workers), source, seed=1, sharding=sharding, start_step=2
        ) as batches:
            steps = [next(batches) for _ in range(6)]
        results[workers] = [jax.device_get(batch) for batch, _ in steps]
        skipped[workers] = [info["skipped"] for _, info in steps]
        assert all(info["generation_seconds"] >= 0 for _, info in steps)
    assert_equal(results[2], results[0])
    assert skipped[2] == skipped[0]
    assert [name for names in skipped[0] for name in names] == [str(broken)] * 2  # once per epoch of 3 steps


def test_workers_load_elements_that_are_not_images():
    source = sequences()
    with train_batches(config(num_workers=2), source, seed=3, sharding=over_batch(), start_step=1) as batches:
        assert_equal(take(batches, 4), expected(source, 3, range(1, 5)))
    assert source.calls == 4  # by `expected` alone


@pytest.mark.parametrize("kind", ["flat folder", "grey npz", "4-channel npz"])
@pytest.mark.parametrize("name", ["grain", "device"])
def test_unlabelled_images_of_any_channels_become_views(tmp_path, name, kind):
    channels = {"flat folder": 3, "grey npz": 1, "4-channel npz": 4}[kind]
    images = np.random.default_rng(0).integers(0, 256, (N, 8, 8, channels), np.uint8)
    if kind == "flat folder":
        for i, image in enumerate(images):
            Image.fromarray(image).save(tmp_path / f"{i}.png")
    else:
        np.savez(tmp_path / "train.npz", image=images[..., 0] if channels == 1 else images)
    settings_ = config(source=kind.split()[-1], dir=str(tmp_path), channels=channels, num_train=0, pipeline=name)
    source = open_source(settings_, "train")
    assert source.spec == image_spec(8, channels, labelled=False) and source.classes == ()
    stored = {image.tobytes() for image in images}
    with train_batches(settings_, source, seed=4, sharding=over_batch()) as batches:
        batch = next(batches)[0]
    assert set(batch) == {"image"} and {image.tobytes() for image in np.asarray(batch["image"])} <= stored
    augment = AugmentConfig(mean=(0.5,) * channels, std=(0.25,) * channels)  # crop and flip
    views = jax.jit(lambda images: augment_views(jax.random.key(0), images, augment, 2))(batch["image"])
    assert views.shape == (2, BATCH, 8, 8, channels) and np.isfinite(views).all()


@pytest.mark.parametrize("workers", [0, 1])
def test_errors_of_the_loader_surface_with_their_message(tmp_path, workers):
    settings_ = write_photos(tmp_path, num_workers=workers)
    source = open_source(settings_, "train")
    broken = tmp_path / "train" / "a" / "2.png"
    broken.write_bytes(b"not an image")
    with train_batches(settings_, source, seed=1, sharding=over_batch()) as batches:
        with pytest.raises(UserError, match=f"{broken}: cannot be read as an image"):
            for _ in range(3):
                next(batches)
        with pytest.raises(StopIteration):  # instead of waiting for ever
            next(batches)


def test_batches_are_made_ahead_while_the_device_computes():
    made = threading.Semaphore(0)

    class Counting(SequenceSource):
        def batch(self, indices):
            made.release()
            return super().batch(indices)

    source = Counting(config(), "train")
    with train_batches(config(prefetch=3), source, seed=0, sharding=over_batch()) as batches:
        next(batches)
        assert all(made.acquire(timeout=600) for _ in range(4))
    assert source.calls <= 5  # three are ready and one is held until there is room; no more


@pytest.mark.parametrize("kind", ["grain", "device"])
def test_the_time_of_a_copy_ends_when_the_copy_does(monkeypatch, kind):
    waited, clock = [], SimpleNamespace(now=0.0)

    def slow_copy(arrays):
        waited.append(threading.current_thread().name)
        clock.now += 5
        return arrays

    monkeypatch.setattr(pipeline.jax, "block_until_ready", slow_copy)
    monkeypatch.setattr(pipeline, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    with train_batches(config(pipeline=kind), sequences(), seed=0, sharding=over_batch()) as batches:
        _, info = next(batches)
    assert info["transfer_seconds"] == 5
    assert waited[0] == ("batch-prefetch" if kind == "grain" else "MainThread")  # the loop does not wait


def test_close_ends_the_thread_and_can_be_repeated():
    def running():
        return sum(thread.name == "batch-prefetch" for thread in threading.enumerate())

    before = running()
    batches = train_batches(config(), sequences(), seed=0, sharding=over_batch())
    assert running() == before  # nothing starts before the first batch
    next(batches)
    assert running() == before + 1
    batches.close()
    batches.close()
    assert running() == before


def test_a_wait_for_a_batch_that_never_comes_can_be_ended(monkeypatch):
    monkeypatch.setattr(pipeline, "JOIN_SECONDS", 0.2)
    release = threading.Event()

    class Hanging(SequenceSource):
        def batch(self, indices):
            release.wait()
            return super().batch(indices)

    def check():
        raise KeyboardInterrupt

    with train_batches(config(), Hanging(config(), "train"), seed=0, sharding=over_batch()) as batches:
        with pytest.raises(KeyboardInterrupt):
            batches.wait(check)
    release.set()  # the thread was left behind


def test_eval_batches_cover_the_split_in_order_with_static_shapes():
    source = sequences("test")
    whole = source.batch(np.arange(20))
    batches = [(jax.device_get(batch), n) for batch, n in eval_batches(source, 8, over_batch())]
    assert [n for _, n in batches] == [8, 8, 4]
    assert {batch["frames"].shape[0] for batch, _ in batches} == {8}
    valid = [jax.tree.map(lambda array, n=n: array[:n], batch) for batch, n in batches]
    assert_equal(jax.tree.map(lambda *arrays: np.concatenate(arrays), *valid), whole)
    [(batch, n)] = eval_batches(source, 64, over_batch())  # larger than the split: repeated as often as needed
    assert n == 20
    np.testing.assert_array_equal(batch["length"], np.resize(whole["length"], 64))


def test_a_batch_larger_than_the_set_is_refused():
    with pytest.raises(UserError, match="config.data.batch_size = 51: the train split has 50 samples; .* <= 50"):
        train_batches(config(batch_size=51), sequences(), seed=0, sharding=over_batch())


def test_a_set_too_large_for_the_device_is_refused():
    device = SimpleNamespace(memory_stats=lambda: {"bytes_limit": 2**30})
    sharding = SimpleNamespace(addressable_devices=[device])
    pipeline._check_room(2**28, sharding)
    with pytest.raises(UserError, match="takes 0.8 of the device's 1.0 GiB; use config.data.pipeline = grain"):
        pipeline._check_room(3 * 2**28, sharding)


def test_workers_are_counted_by_the_cores(monkeypatch):
    from jepa_jax.config import groups
    from jepa_jax.config.checks import checked
    from jepa_jax.config.schema import entries

    monkeypatch.setattr(groups, "num_cores", lambda: 8)
    key = entries(DataConfig, "data.")["data.num_workers"].key
    auto = checked("data.num_workers", "auto", key)
    assert DataConfig(num_workers=auto).workers == 7
    assert DataConfig(num_workers=auto, pipeline="device").workers == 0
    assert [DataConfig(num_workers=count).workers for count in (0, 5, 16, 64)] == [0, 5, 16, 16]
    monkeypatch.setattr(groups, "num_cores", lambda: 1)
    assert DataConfig(num_workers=auto).workers == 0
