"""Data sets of other makers: what they look like as sources, and what is said about wrong ones."""

import itertools
import pickle

import grain
import jax
import numpy as np
import pytest

from jepa_jax.base.errors import UserError
from jepa_jax.config.groups import DataConfig
from jepa_jax.data.batches import batch_dataset
from jepa_jax.data.contract import Source, image_spec
from jepa_jax.data.elements import StreamSource, as_source
from jepa_jax.data.pipeline import load_batches
from jepa_jax.data.sources import open_data, open_source
from jepa_jax.runtime.mesh import batch_sharding, make_mesh
from tests.data.foreign import KINDS, SIZE, arrays, map_dataset
from tests.sequences import SequenceSource


def config(**keys):
    return DataConfig(**{"image_size": SIZE, "num_train": 96, "num_test": 32, "batch_size": 8} | keys)


def opened(kind, **keys):
    return open_data(config(source="python", **keys), {split: KINDS[kind](split) for split in ("train", "test")})


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_the_same_source(kind):
    train, test, _ = opened(kind)
    assert isinstance(train, Source) and train.spec == test.spec == image_spec(SIZE)
    assert (len(train), len(test)) == (96, 32)
    named = kind in ("torch", "hugging_face", "tfds")
    assert train.classes == (tuple("abcd") if named else tuple(map(str, range(10))))
    if kind != "stream":
        wanted = {name: array[[5, 0, 5]] for name, array in arrays("train").items()}
        jax.tree.map(np.testing.assert_array_equal, train.batch(np.array([5, 0, 5])), wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_as_many_elements_are_used_as_are_asked_for(kind):
    train, test, _ = opened(kind, num_train=20, num_test=10)
    assert (len(train), len(test)) == (20, 10)
    assert len(train.batch(np.arange(20))["label"]) == 20
    with pytest.raises(UserError, match="97|ends after 96"):
        opened(kind, num_train=97)


def test_a_source_of_ones_own_is_limited_too():
    named = {"source": "tests.sequences:SequenceSource"}
    whole = SequenceSource(config(), "train")
    assert len(open_source(config(**named), "train")) == 96
    limited = open_data(config(source="python", num_train=9), {"train": whole, "test": whole}).train
    assert len(limited) == 9 and len(limited.batch(np.arange(9))["length"]) == 9


def test_functions_of_a_config_return_datasets():
    train, _, held_out = open_data(config(source="tests.data.foreign:map_dataset", num_train=0, validation=0.25))
    assert (len(train), len(held_out)) == (72, 24)
    stream = open_source(config(source="tests.data.foreign:stream"), "train")
    assert isinstance(stream, StreamSource)
    with pytest.raises(UserError, match="data.validation = 0.25: a stream cannot be divided"):
        open_source(config(source="tests.data.foreign:stream", validation=0.25), "train")
    with pytest.raises(UserError, match="data.num_train = 0: a stream has no length"):
        open_source(config(source="tests.data.foreign:stream", num_train=0), "train")


@pytest.mark.parametrize("source", ["map_dataset", "stream"])
def test_transforms_change_every_element(source):
    plain, darker = (
        open_source(config(source=f"tests.data.foreign:{source}", transforms=transforms), "train")
        for transforms in ((), ("tests.data.foreign:darker",))
    )
    np.testing.assert_array_equal(darker.batch(np.arange(4))["image"], plain.batch(np.arange(4))["image"] // 2)
    first, second = (next(iter(batch_dataset(one, 8))) for one in (plain, darker))
    np.testing.assert_array_equal(second["image"], first["image"] // 2)
    np.testing.assert_array_equal(second["label"], first["label"])


@pytest.mark.parametrize(("workers", "window"), [(0, -1), (1, -1), (0, 20)])
def test_a_stream_goes_on_from_the_state_of_any_batch(workers, window):
    batches = batch_dataset(opened("stream", shuffle_window=window).train, 8)
    sharding = batch_sharding(make_mesh(1, 1, jax.devices()[:1]))
    with load_batches(batches, sharding=sharding, start=None) as loaded:
        whole = [next(loaded) for _ in range(16)]  # 12 per epoch
    seen = [int(label) for batch, _ in whole[:12] for label in batch["label"]]
    if window < 0:  # windows reach across the end of the stream
        assert np.bincount(seen).tolist() == [24] * 4
    with load_batches(batches, sharding=sharding, start=whole[4][1]["state"], num_workers=workers) as loaded:
        for batch, info in whole[5:]:
            again, position = next(loaded)
            jax.tree.map(np.testing.assert_array_equal, again, batch)
            assert position["state"] == info["state"]


def test_elements_of_a_stream_are_shuffled_within_windows():
    plain, shuffled = (opened("stream", shuffle_window=window).train.stream for window in (-1, 20))
    plain = [bytes(element["image"]) for element in plain]
    shuffled = [bytes(element["image"]) for element in itertools.islice(shuffled, 192)]
    assert len(plain) == 96 and shuffled[:96] != plain
    assert shuffled[96:] != shuffled[:96]  # the next pass has another order
    for first in range(0, 180, 20):
        assert sorted((2 * plain)[first : first + 20]) == sorted(shuffled[first : first + 20])


def test_processes_read_parts_of_one_batch_of_a_stream():
    source = opened("stream").train
    whole = next(iter(batch_dataset(source, 8)))
    parts = [next(iter(batch_dataset(source, 8, process_index=i, process_count=2))) for i in range(2)]
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(lambda *x: np.concatenate(x), *parts), whole)


class Wrong:
    """A source that declares one thing and delivers another."""

    classes = ()
    spec = {"x": jax.ShapeDtypeStruct((3,), np.float32)}

    def __init__(self, made):
        self.made = made

    def __len__(self):
        return 32

    def batch(self, indices):
        return self.made(len(indices))


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda n: {"y": np.zeros((n, 3), np.float32)}, r"no 'x', only y; declared is float32\[8, 3\]"),
        (lambda n: {"x": np.zeros((n - 1, 3), np.float32)}, r"'x' of a batch is float32\[7, 3\]; declared"),
        (lambda n: {"x": np.zeros((n, 4), np.float32)}, r"'x' of a batch is float32\[8, 4\]; declared"),
        (lambda n: {"x": np.zeros((n, 3))}, r"'x' of a batch is float64\[8, 3\]; declared"),
    ],
)
def test_a_batch_that_is_not_as_declared_is_refused_by_name(made, message):
    with pytest.raises(UserError, match=message):
        batch_dataset(Wrong(made), 8)[0]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"image": arrays("train")["image"] / 255}, "'image' is float64, .*; convert it to float32"),
        (arrays("train") | {"label": np.zeros(3, int)}, "arrays of lengths"),
        ({name: array[:0] for name, array in arrays("train").items()}, "arrays of lengths"),
        ([(np.zeros((16, 16, 3), np.uint8), 1, 2)] * 3, "an element has 3 parts"),
        ({"image": arrays("train")["image"].transpose(0, 3, 1, 2)}, "images of 3 x 16 pixels; .*channels last"),
        ([(np.zeros((16, 16, 3), np.uint8), 0), (np.zeros((16, 15, 3), np.uint8), 0)], None),
        (map_dataset(None, "train").repeat(), "a dataset without end; leave out `repeat`"),
        (grain.MapDataset.range(5).filter(lambda n: n > 3), "element 0 was filtered out"),
        (17, "int is no data set; give a dict of arrays, a Grain dataset"),
        ({"image": arrays("train")["image"], "name": np.array(["a"] * 96)}, "'name' holds <U1, which is no number"),
    ],
)
def test_data_that_cannot_be_used_is_named(given, message):
    keys = config(source="python", num_train=0)
    if message is None:
        source = as_source(given)
        with pytest.raises(UserError, match=r"'image' of element 1 is uint8\[16, 15, 3\], and of the first one"):
            source.batch(np.array([0, 1]))
        return
    with pytest.raises(UserError, match=message):
        open_data(keys, {"train": given, "test": given})


def test_a_label_beyond_the_classes_is_refused():
    source = as_source([(np.zeros((16, 16, 3), np.uint8), label) for label in [0] * 9 + [3]])
    source.classes = ("a", "b")
    with pytest.raises(UserError, match=r"'label' is outside 0..1; give the data set an attribute `classes`"):
        source.batch(np.arange(10))


def test_a_split_that_was_not_given_is_named():
    with pytest.raises(UserError, match="holds train and no 'test'"):
        open_data(config(source="python"), {"train": arrays("train")})
    with pytest.raises(UserError, match="data.source = python: this data was given to jepa_jax.train"):
        open_data(config(source="python"))


def test_worker_processes_share_given_arrays_instead_of_copying_them():
    given = {"image": np.random.default_rng(0).integers(0, 256, (500, 7, 5, 3), np.uint8), "label": np.arange(500) % 7}
    source = as_source(given)
    content = pickle.dumps(source)
    assert len(content) < 3000
    copied = pickle.loads(content).batch(np.arange(500))
    for name, array in given.items():
        np.testing.assert_array_equal(copied[name], array)
