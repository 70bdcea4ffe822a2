"""Sequences on disk: either layout and either side of padding give one element; bad files are refused by name."""

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jepa_jax.base.errors import UserError
from jepa_jax.config.groups import DataConfig
from jepa_jax.data.contract import abstract_batch
from jepa_jax.data.sources import open_splits
from jepa_jax.program.workdir import Workdir
from jepa_jax.projects.wildfire.data.sequences import read_sequence
from jepa_jax.training.run import start_folder
from jepa_jax.training.setup import NO_HOOKS, prepare
from tests.projects.wildfire.evals.pixel_method import fire_config
from tests.runs import Silent

SIZE, CHANNELS, CAP = 5, 4, 6


def sequence(length=4, seed=0):
    rng = np.random.default_rng(seed)
    return {
        "fire": rng.integers(2, size=(length, SIZE, SIZE, 1)),
        "wind": rng.random((length, 2)),
        "static": rng.random((SIZE, SIZE, CHANNELS)),
        "target": rng.integers(2, size=(SIZE, SIZE, 1)),
        "known": rng.integers(2, size=(SIZE, SIZE, 1)),
    }


def without_target(length):
    return {key: array for key, array in sequence(length).items() if key != "target"}


def read(folder, arrays):
    np.savez(folder / "one.npz", **arrays)
    return read_sequence(folder / "one.npz", SIZE, CHANNELS, CAP, fire_id=3)


def assert_same(element, other):
    assert set(element) == set(other)
    for key in element:
        np.testing.assert_array_equal(element[key], other[key], err_msg=key)


def opened(folder, **keys):
    keys = dict(source="fire_sequences", dir=str(folder), image_size=SIZE, channels=CHANNELS, max_frames=CAP) | keys
    return open_splits(DataConfig(**keys))


@settings(max_examples=20)
@given(length=st.integers(2, CAP), before=st.integers(0, 3), after=st.integers(0, 3), seed=st.integers(0, 99))
def test_padding_on_either_side_gives_the_same_element(tmp_path_factory, length, before, after, seed):
    folder = tmp_path_factory.getbasetemp()
    plain = sequence(length, seed)
    sides = (before, after)
    padded = plain | {
        "fire": np.pad(plain["fire"], (sides, (0, 0), (0, 0), (0, 0)), constant_values=1),
        "wind": np.pad(plain["wind"], (sides, (0, 0)), constant_values=0.7),
        "valid": np.pad(np.ones(length), sides),
    }
    element = read(folder, plain)
    assert_same(element, read(folder, padded))
    assert element["valid"].tolist() == [False] * (CAP - length) + [True] * length
    np.testing.assert_array_equal(element["fire"][CAP - length :], plain["fire"])
    np.testing.assert_array_equal(element["wind"][CAP - length :], plain["wind"].astype(np.float32))
    assert not element["fire"][: CAP - length].any() and not element["wind"][: CAP - length].any()


def test_both_layouts_are_read_and_the_last_frame_is_the_default_target(tmp_path):
    plain = sequence()
    moved = {"fire": (3, 1, 2, 0), "wind": (1, 0), "static": (2, 0, 1), "target": (2, 0, 1), "known": (2, 0, 1)}
    assert_same(read(tmp_path, plain), read(tmp_path, {key: plain[key].transpose(axes) for key, axes in moved.items()}))
    whole = plain | {
        "fire": np.append(plain["fire"], plain["target"][None], 0),
        "wind": np.append(plain["wind"], [[0, 1]], 0),
    }
    del whole["target"]
    assert_same(read(tmp_path, plain), read(tmp_path, whole))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: sequence(1), "has 1 frames of history, expected 2 to 6; remove the file"),
        (lambda a: without_target(2), r"has 1 frames of history \(the last frame is the target\), expected 2"),
        (lambda a: sequence(7), "has 7 frames of history, expected 2 to 6; cut it, or set --config.data.max_frames=7"),
        (lambda a: without_target(8), r"has 7 frames of history \(the last frame is the target\), expected 2 to 6"),
        (lambda a: a | {"wind": a["wind"][:-1]}, r"wind is \(3, 2\).*as many frames"),
        (lambda a: a | {"wind": np.full((4, 2), np.nan)}, "wind has 8 NaN; fill them"),
        (lambda a: a | {"wind": np.array([[5, 270]] * 4)}, r"wind is in 5\.\.270, expected 0\.\.1; scale the speed"),
        (lambda a: a | {"static": a["static"] * np.nan}, "static has 100 NaN"),
        (lambda a: a | {"static": a["static"] * 0 - 3}, r"static is in -3\.\.-3, expected 0\.\.1; scale each channel"),
        (lambda a: a | {"static": a["static"][..., :2]}, r"static is \(5, 5, 2\).*set --config.data.channels=2"),
        (lambda a: a | {"static": a["static"].transpose(2, 0, 1)}, r"static .*use static.transpose\(1, 2, 0\)"),
        (lambda a: a | {"static": a["static"][:3, :3]}, "static .*give static the side of fire"),
        (lambda a: a | {"static": a["static"].astype(str)}, "static is <U.*, expected numbers"),
        (lambda a: a | {"static": a["static"].astype(object)}, r"not a readable .npz file \(static.npy: an array"),
        (lambda a: a | {"fire": a["fire"] * 255}, "fire has values other than 0 and 1"),
        (lambda a: a | {"fire": a["fire"] * np.nan}, "fire has values other than 0 and 1"),
        (lambda a: a | {"target": a["target"] - 1}, "target has values other .*unknown pixels in the array known"),
        (lambda a: a | {"fire": a["fire"][:, :4]}, r"fire is \(4, 4, 5, 1\).*tiles are square"),
        (lambda a: a | {"fire": a["fire"][:, :4, :4]}, r"fire is \(4, 4, 4, 1\).*set --config.data.image_size=4"),
        (lambda a: a | {"fire": a["fire"][..., 0]}, r"fire has shape \(4, 5, 5\), .*; use fire\[\.\.\., None\]"),
        (lambda a: a | {"fire": a["fire"].transpose(0, 3, 1, 2)}, r"fire has .*use fire.transpose\(0, 2, 3, 1\)"),
        (lambda a: a | {"target": a["target"][:3]}, "target is"),
        (lambda a: a | {"target": a["target"][..., 0]}, r"target is \(5, 5\).*use target\[\.\.\., None\]"),
        (lambda a: a | {"valid": np.array([1, 0, 1, 1])}, "valid must be .*one run of ones"),
        (lambda a: {k: v for k, v in a.items() if k != "wind"}, "holds .*; add an array named wind"),
    ],
)
def test_bad_sequences_are_refused_with_the_file_named(tmp_path, change, message):
    for split in ("train", "test"):
        (tmp_path / split).mkdir()
        np.savez(tmp_path / split / f"{split}0.npz", **sequence())
    np.savez(tmp_path / "train" / "bad.npz", **change(sequence()))
    with pytest.raises(UserError, match=f"train/bad.npz: {message}"):
        opened(tmp_path)


@pytest.mark.parametrize("content", ["text", "one array", "cut"])
def test_files_that_are_no_archive_are_refused_without_advice_to_trust_them(tmp_path, content):
    file = tmp_path / "bad.npz"
    np.savez(file, **sequence())
    if content == "one array":
        with open(file, "wb") as opened_file:
            np.save(opened_file, np.zeros(3))
    else:
        file.write_bytes(b"fire,wind\n1,2\n" if content == "text" else file.read_bytes()[:300])
    with pytest.raises(UserError, match="bad.npz: not a readable .npz file .*write it with numpy.savez") as error:
        opened(tmp_path)
    assert "pickle" not in str(error.value)


def test_a_folder_whose_hash_gives_no_test_fire_says_what_to_do(tmp_path):
    for fire in ("a", "b"):  # neither is a test fire
        np.savez(tmp_path / f"{fire}.npz", **sequence())
    with pytest.raises(UserError, match="2 fires, none falls into the tenth for testing; make .*/train and .*/te"):
        opened(tmp_path)


def test_files_that_name_no_fires_are_a_caveat(tmp_path):
    for i in range(60):
        np.savez(tmp_path / f"{i:02}.npz", **sequence(seed=i))
    train, _ = opened(tmp_path, validation=0.2)
    assert "no train file has a fire_id" in train.caveat and "give them the same fire_id" in train.caveat
    for i in range(60):
        np.savez(tmp_path / f"{i:02}.npz", **sequence(seed=i), fire_id=i // 2)
    assert not opened(tmp_path, validation=0.2)[0].caveat


def test_one_folder_is_split_by_fire(tmp_path):
    for i in range(60):
        np.savez(tmp_path / f"{i:02}.npz", **sequence(2 + i % 5, seed=i), fire_id=f"fire {i // 2}")
    train, test = opened(tmp_path)
    batches = [source.batch(np.arange(len(source))) for source in (train, test)]
    assert len(train) + len(test) == 60 and 2 <= len(test) <= 16
    for batch in batches:  # both sequences of a fire are in one split, under one number
        assert set(np.unique(batch["fire_id"], return_counts=True)[1]) == {2}
    assert not {bytes(s) for s in batches[0]["static"]} & {bytes(s) for s in batches[1]["static"]}
    assert {k: (a.shape, a.dtype) for k, a in batches[0].items()} == {
        k: (one.shape, one.dtype) for k, one in abstract_batch(train.spec, len(train)).items()
    }
    assert_same(pickle.loads(pickle.dumps(train)).batch(np.array([5])), train.batch(np.array([5])))
    assert len(opened(tmp_path, num_train=7)[0]) == 7


def test_a_fire_in_both_splits_is_refused(tmp_path):
    for split in ("train", "val"):
        (tmp_path / split).mkdir()
        np.savez(tmp_path / split / f"of_{split}.npz", **sequence(), fire_id=17)
    with pytest.raises(UserError, match="of_val.npz: fire 17 is in both splits"):
        opened(tmp_path)


def said(folder, **arrays):
    """Returns what a run says that is started on 36 train and 12 test sequences."""
    rng, data = np.random.default_rng(0), folder / "data"
    for number in range(48):
        split = data / ("train" if number < 36 else "test")
        split.mkdir(parents=True, exist_ok=True)
        named = {name: make(number) for name, make in arrays.items()}
        fire, static = rng.integers(2, size=(4, 16, 16, 1)), rng.random((16, 16, 3))
        np.savez(split / f"{number}.npz", fire=fire, wind=rng.random((4, 2)), static=static, **named)
    config = fire_config(data__source="fire_sequences", data__dir=str(data), data__num_train=0, data__num_test=0)
    console = Silent()
    start_folder(prepare(config, Workdir(folder / "run"), console, NO_HOOKS))
    return console.lines


def test_a_run_on_files_that_name_no_fires_warns_once(tmp_path):
    lines = said(tmp_path)
    assert sum("no train file has a fire_id, so each of the 36 counts as a fire" in line for line in lines) == 1


def test_a_run_says_of_how_many_fires_its_sequences_are(tmp_path):
    lines = said(tmp_path, fire_id=lambda number: number // 3)
    assert any("27 train and 12 test sequences of 9 and 4 fires, 9 held out" in line for line in lines), lines
    assert not any("fire_id" in line for line in lines)
