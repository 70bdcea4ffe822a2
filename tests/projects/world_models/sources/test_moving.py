"""Moving shapes and digits: paths that bounce, maps that mark centres, and splits that share nothing."""

import pickle

import numpy as np
import pytest

from jepa_jax.base.errors import UserError
from jepa_jax.data.sources import open_data
from jepa_jax.program.config import load_config
from jepa_jax.projects.world_models.sources.bouncing import SPEED, bounce, detection_map
from jepa_jax.projects.world_models.sources.moving_mnist import detected
from jepa_jax.projects.world_models.sources.moving_shapes import DIM, KINDS, shape
from tests.projects.world_models.tiny import DATA


def config(source, **more):
    values = DATA | {"data.source": source, "data.num_train": 0, "data.num_test": 0}
    return load_config("moving_shapes_cpu", values | {f"data.{name}": value for name, value in more.items()})


def test_a_path_is_straight_between_the_borders_and_turns_at_them():
    """Rounded to pixels of a way of 100,000, so that rounding is far below a step."""
    for seed in range(20):
        places = bounce(np.random.default_rng(seed), 40, 100_000) / 100_000
        assert places.min() >= 0 and places.max() <= 1
        step = np.diff(places, axis=0)
        inside = ((places > 0) & (places < 1)).all(axis=1)
        free = inside[:-1] & inside[1:]
        np.testing.assert_allclose(np.linalg.norm(step[free], axis=1), SPEED, atol=1e-4)
        at_border = np.flatnonzero(~inside[1:-1]) + 1
        for t in at_border:
            axis = np.flatnonzero((places[t] == 0) | (places[t] == 1))
            turned = np.sign(step[t][axis]) * np.sign(step[t - 1][axis])
            assert (turned <= 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_shape_lies_in_the_middle_of_its_square(kind):
    covered = shape(kind, 20)
    assert covered.max() == 1 and 0.4 < covered.mean() < 0.9
    np.testing.assert_allclose(covered, covered[:, ::-1])


def test_the_detection_map_marks_the_cell_of_each_centre():
    found = detection_map(np.array([[[0.0, 63.0], [31.9, 8.0]]]), 64)
    assert list(map(tuple, np.argwhere(found[0]))) == [(1, 4), (7, 0)]
    frame = np.zeros((64, 64), np.uint8)
    frame[10:14, 40:45] = 200  # centre (42, 11.5)
    frame[50:60, 3:9] = 90
    assert list(map(tuple, np.argwhere(detected(frame)))) == [(1, 5)]
    frame[50:60, 3:9] = 110
    assert list(map(tuple, np.argwhere(detected(frame)))) == [(1, 5), (6, 0)]


def test_shapes_depend_on_seed_split_and_index_alone():
    splits = open_data(config("moving_shapes", num_train=64, num_test=16, validation=0.25).data)
    first = splits.train.batch(np.array([3, 5]))
    again = pickle.loads(pickle.dumps(splits.train)).batch(np.array([5]))
    assert all(np.array_equal(first[name][1], again[name][0]) for name in first)
    drawn = [source.batch(np.arange(len(source)))["frames"] for source in splits]
    sequences = {frames.tobytes() for part in drawn for frames in part}
    assert len(sequences) == 64 + 16 and len(splits.validation) == 16
    centre = first["states"][0]
    assert centre.shape == (6, 2) and (0 < centre).all() and (centre < 16).all()
    assert (first["detections"].sum(axis=(2, 3)) >= 1).all() and (first["detections"].sum(axis=(2, 3)) <= 3).all()


def test_noise_hides_the_shapes_of_the_same_sequences():
    clear, noisy = (
        open_data(config(name, num_train=64, num_test=16).data).train.batch(np.arange(64))
        for name in ("moving_shapes", "noisy_shapes")
    )
    np.testing.assert_array_equal(clear["states"], noisy["states"])
    np.testing.assert_array_equal(clear["detections"], noisy["detections"])
    frames, ground = noisy["frames"].astype(float), clear["frames"] == 0
    difference = frames[~ground].mean() - frames[ground].mean()
    assert difference == pytest.approx(DIM * clear["frames"][~ground].mean(), rel=0.1)  # some is lost by clipping
    assert difference < frames[ground].std()
    change = np.diff(frames, axis=1)[ground[:, 1:] & ground[:, :-1]]
    assert change.std() == pytest.approx(np.sqrt(2) * frames[ground].std(), rel=0.02)  # each frame has its own noise


@pytest.mark.parametrize(
    "more, message",
    [
        ({"num_train": 0}, "data.num_train = 0: moving_shapes is drawn on demand"),
        ({"channels": 3}, "data.channels = 3: moving_shapes is grey"),
        ({"max_frames": 8, "image_size": 8}, "data.image_size = 8: moving_shapes needs 16 pixels"),
    ],
)
def test_what_shapes_cannot_be_is_named(more, message):
    from jepa_jax.projects.world_models.sources.moving_shapes import MovingShapes

    values = {"num_train": 8, "num_test": 8} | more
    with pytest.raises(UserError, match=message):
        MovingShapes(config("moving_shapes", **{**values, "image_size": 16}).data if "image_size" not in more else
                     config("shapes", **{**values, "image_size": 8, "max_frames": 8}).data, "train")  # fmt: skip


@pytest.fixture
def stored(tmp_path):
    """A file in the layout of the published one: 30 sequences of 12 frames."""
    frames = np.random.default_rng(0).integers(0, 256, (12, 30, 16, 16), np.uint8)
    np.save(tmp_path / "mnist_test_seq.npy", frames)
    return frames, tmp_path / "mnist_test_seq.npy"


def test_halves_of_a_stored_sequence_are_on_one_side(stored):
    frames, file = stored
    train, test, validation = open_data(config("moving_mnist", dir=str(file), validation=0.2).data)
    order = np.random.RandomState(2025).permutation(30)
    assert sorted(set(test.groups)) == sorted(order[:3]) and len(test) == 6
    groups = [set(source.groups) for source in (train, test, validation)]
    assert not (groups[0] & groups[1] or groups[0] & groups[2] or groups[1] & groups[2])
    assert sum(map(len, groups)) == 30
    batch = test.batch(np.arange(6))
    for clip, group in zip(batch["frames"], test.groups, strict=True):
        halves = frames[:6, group], frames[6:, group]
        assert any(np.array_equal(clip[..., 0], half) for half in halves)
    assert batch["detections"].shape == (6, 6, 8, 8)


def test_stored_sequences_of_another_form_are_refused(stored, tmp_path):
    _, file = stored
    with pytest.raises(UserError, match="holds 30 sequences of 12 frames; set data.max_frames to 12 or less"):
        open_data(config("moving_mnist", dir=str(file), max_frames=13).data)
    with pytest.raises(UserError, match=r"holds uint8 .*, expected uint8 \[frames, sequences, 32, 32\]"):
        open_data(config("moving_mnist", dir=str(file), image_size=32).data)
    (tmp_path / "bad.npy").write_bytes(b"no array")
    with pytest.raises(UserError, match="bad.npy: not a readable .npy file"):
        open_data(config("moving_mnist", dir=str(tmp_path / "bad.npy")).data)
    with pytest.raises(UserError, match="no such file or folder; give mnist_test_seq.npy"):
        open_data(config("moving_mnist", dir=str(tmp_path / "absent")).data)
