"""Clips of videos and of folders of frames, windows of recorded episodes, and files that cannot be read."""

import pickle

import numpy as np
import pytest
from PIL import Image

from jepa_jax.base.errors import UserError
from jepa_jax.data.facts import data_facts
from jepa_jax.data.sources import open_data
from jepa_jax.program.config import load_config
from tests.projects.world_models.tiny import DATA


def config(source, place, **more):
    values = DATA | {"data.source": source, "data.dir": str(place), "data.num_train": 0, "data.num_test": 0}
    values["method.steps"] = 1
    return load_config("moving_shapes_cpu", values | {f"data.{name}": value for name, value in more.items()}).data


def write_frames(folder, count, level=0):
    """Writes frames whose grey level is their number plus `level`."""
    folder.mkdir(parents=True)
    for number in range(count):
        Image.fromarray(np.full((20, 24), number + level, np.uint8)).save(folder / f"{number:04d}.png")


@pytest.fixture
def folders(tmp_path):
    write_frames(tmp_path / "train" / "a", 13)
    write_frames(tmp_path / "train" / "b", 6, level=50)
    write_frames(tmp_path / "train" / "short", 3)
    write_frames(tmp_path / "test" / "c", 7, level=100)
    return tmp_path


def test_clips_follow_one_another_and_keep_to_their_video(folders):
    train, test, _ = open_data(config("clips", folders))
    assert (len(train), len(test)) == (3, 1) and len(set(train.groups)) == 2
    levels = {tuple(clip[:, 0, 0, 0]) for clip in pickle.loads(pickle.dumps(train)).batch(np.arange(3))["frames"]}
    assert levels == {tuple(range(6)), tuple(range(6, 12)), tuple(range(50, 56))}
    strided, _, _ = open_data(config("clips", folders, max_frames=3, frame_stride=2))
    levels = sorted(tuple(clip[:, 0, 0, 0]) for clip in strided.batch(np.arange(len(strided)))["frames"])
    assert levels == [(0, 2, 4), (6, 8, 10), (50, 52, 54)]


def test_a_validation_split_shares_no_video(folders):
    train, _, validation = open_data(config("clips", folders, validation=0.4))
    assert len(set(train.groups)) == len(set(validation.groups)) == 1 and not set(train.groups) & set(validation.groups)


def test_a_folder_without_splits_is_divided_by_name(tmp_path):
    for number in range(40):
        write_frames(tmp_path / f"video{number}", 6, level=number)
    train, test, _ = open_data(config("clips", tmp_path))
    assert len(train) + len(test) == 40 and len(test) > 0


def test_videos_that_cannot_be_used_are_named(folders, tmp_path):
    with pytest.raises(UserError, match="a clip spans 14 frames, the longest video 13; use fewer data.max_frames"):
        open_data(config("clips", folders, max_frames=14))
    with pytest.raises(UserError, match="no such folder; clips needs D/train"):
        open_data(config("clips", tmp_path / "absent"))
    (folders / "train" / "b" / "0003.png").write_bytes(b"no image")
    train, _, _ = open_data(config("clips", folders))
    with pytest.raises(UserError, match=r"b/0003.png: cannot be read as an image"):
        train.batch(np.arange(3))
    assert not data_facts(config("clips", tmp_path / "absent"), assume=True).found
    assert data_facts(config("clips", tmp_path / "absent"), assume=True).spec["frames"].shape == (6, 16, 16, 1)


def test_video_files_are_decoded_frame_by_frame(tmp_path):
    av = pytest.importorskip("av")
    for split, base in (("train", 20), ("test", 40)):
        (tmp_path / split).mkdir()
        with av.open(str(tmp_path / split / "one.mp4"), "w") as container:
            stream = container.add_stream("mpeg4", rate=25)
            stream.width, stream.height, stream.pix_fmt, stream.bit_rate = 48, 32, "yuv420p", 2_000_000
            for number in range(13):
                pixels = np.full((32, 48, 3), base + 15 * number, np.uint8)
                container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
            container.mux(stream.encode())
    train, test, _ = open_data(config("clips", tmp_path))
    assert (len(train), len(test)) == (2, 2)
    clips = sorted(train.batch(np.arange(2))["frames"].mean(axis=(2, 3, 4)).tolist())
    np.testing.assert_allclose(clips, 20 + 15 * np.arange(12).reshape(2, 6), atol=4)
    (tmp_path / "train" / "bad.mp4").write_bytes(b"no video")
    with pytest.raises(UserError, match="bad.mp4: cannot be read as a video"):
        open_data(config("clips", tmp_path))


LENGTHS = (7, 9, 6, 12, 3)


def arrays():
    """Returns episodes whose frames, actions and states name episode and time."""
    episode = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
    time = np.concatenate([np.arange(length) for length in LENGTHS])
    frames = np.zeros((len(time), 16, 16, 1), np.uint8)
    frames[:, 0, 0, 0], frames[:, 0, 1, 0] = episode, time
    states = np.stack([episode, time], axis=1).astype(np.float64)
    return {"frames": frames, "actions": states[:, 1:], "states": states, "ends": np.cumsum(LENGTHS)}


def written(kind, folder):
    if kind == "npz":
        np.savez(folder / "data.npz", **arrays())
        return folder / "data.npz"
    h5py = pytest.importorskip("h5py")
    with h5py.File(folder / "data.h5", "w") as file:
        for name, array in arrays().items():
            file[name] = array
    return folder / "data.h5"


@pytest.mark.parametrize("kind", ["npz", "h5"])
def test_windows_keep_to_their_episode(kind, tmp_path):
    place = written(kind, tmp_path)
    train, test, validation = open_data(config("trajectories", place, validation=0.3))
    assert train.targets == ("states",) and train.spec["actions"].shape == (6, 1)
    windows = 0
    for source in (train, test, validation):
        batch = pickle.loads(pickle.dumps(source)).batch(np.arange(len(source)))
        episode, time = batch["states"][..., 0], batch["states"][..., 1]
        assert (episode == source.groups[:, None]).all() and (np.diff(time, axis=1) == 1).all()
        np.testing.assert_array_equal(batch["frames"][:, :, 0, 1, 0], time)
        np.testing.assert_array_equal(batch["actions"][..., 0], time)
        windows += len(source)
    groups = [set(source.groups) for source in (train, test, validation)]
    assert not (groups[0] & groups[1] or groups[0] & groups[2] or groups[1] & groups[2])
    assert windows == sum(max(0, length - 5) for length in LENGTHS)
    strided = open_data(config("trajectories", place, max_frames=3, frame_stride=2)).train
    assert (np.diff(strided.batch(np.arange(4))["states"][..., 1], axis=1) == 2).all()


def test_a_folder_has_a_file_per_split(tmp_path):
    for split in ("train", "val"):
        np.savez(tmp_path / f"{split}.npz", **arrays())
    train, test, _ = open_data(config("trajectories", tmp_path))
    assert len(train) == len(test) == sum(max(0, length - 5) for length in LENGTHS)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"frames": None}, "add an array named frames"),
        ({"frames": np.zeros((37, 8, 8, 1), np.uint8)}, r"frames are uint8 .*, expected uint8 \[N, 16, 16, 1\]"),
        ({"actions": np.zeros((5, 1))}, "one row for each of 37 frames"),
        ({"ends": np.array([7, 5, 37])}, "ends must be ascending integers, the last one 37"),
        ({"ends": np.array([4, 8, 12, 16, 20, 24, 28, 32, 37])}, "a window spans 6 frames"),
    ],
)  # fmt: skip
def test_recordings_that_do_not_fit_are_named(change, message, tmp_path):
    content = {name: value for name, value in (arrays() | change).items() if value is not None}
    np.savez(tmp_path / "data.npz", **content)
    with pytest.raises(UserError, match=message):
        open_data(config("trajectories", tmp_path / "data.npz"))
    with pytest.raises(UserError, match="neither a file nor a folder with train.npz or"):
        open_data(config("trajectories", tmp_path / "absent"))
