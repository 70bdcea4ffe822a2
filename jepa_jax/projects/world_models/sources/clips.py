"""`clips`: clips of the videos of a folder. A video is a file, read with PyAV, or a folder of its frames as images.

`data.dir` D holds D/train and D/test (or D/val), or the videos of both splits, of which a hash of the name then makes
one in ten a test video. Clips of `data.max_frames` frames, one of every `data.frame_stride`, follow one another without
overlap; the clips of a video are a group.
"""

import os
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from jepa_jax.base.errors import UserError
from jepa_jax.config.groups import DataConfig
from jepa_jax.data.contract import ElementNames, Spec
from jepa_jax.data.in_memory import Arrays
from jepa_jax.data.photos.crops import centre_crop, centre_of
from jepa_jax.data.photos.decode import Photo
from jepa_jax.data.readers.folder import EXTENSIONS, split_folder
from jepa_jax.data.readers.undivided import is_test_name, name_digest
from jepa_jax.projects.world_models.sources.cut import CutSequences

VIDEOS = (".mp4", ".m4v", ".mkv", ".webm", ".avi", ".mov", ".gif")
FORMATS = {1: "gray", 3: "rgb24"}  # of decoded frames, by channels


class Clips(CutSequences):
    """Clips of the videos of one split; a batch decodes each of its videos once."""

    element_names = ElementNames("clips", "videos")

    def __init__(self, data: DataConfig, split: str):
        if data.channels not in FORMATS:
            raise UserError(f"config.data.channels = {data.channels}: videos have 3 channels, or 1 as grey")
        self._data = data
        self._videos = list_videos(data.dir, split)
        span = (data.max_frames - 1) * data.frame_stride + 1
        lengths = [count_frames(video) for video in self._videos]
        places = [
            (video, first)
            for video, length in enumerate(lengths)
            for first in range(0, length - span + 1, data.max_frames * data.frame_stride)
        ]
        if not places:
            longest = max(lengths)
            fix = "use fewer data.max_frames, a smaller data.frame_stride, or longer videos"
            raise UserError(
                f"config.data.dir = {data.dir!r}: a clip spans {span} frames, the longest video {longest}; {fix}"
            )
        super().__init__(data, split, places)
        self.spec = clip_spec(data)

    @staticmethod
    def expected_specs(data: DataConfig) -> list[Spec]:
        """See `jepa_jax.data.contract.ExpectsSpecs`."""
        return [clip_spec(data)]

    def batch(self, indices: np.ndarray) -> Arrays:
        frames = np.empty((len(indices), *self.spec["frames"].shape), np.uint8)
        places = self._places[np.asarray(indices)]
        offsets = self._data.frame_stride * np.arange(self._data.max_frames)
        for video in np.unique(places[:, 0]):
            own = np.flatnonzero(places[:, 0] == video)
            wanted = places[own, 1][:, None] + offsets
            decoded = read_frames(self._videos[video], np.unique(wanted), self._data)
            frames[own] = [[decoded[int(number)] for number in clip] for clip in wanted]
        return {"frames": frames}


def clip_spec(data: DataConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the spec of a clip."""
    shape = (data.max_frames, data.image_size, data.image_size, data.channels)
    return {"frames": jax.ShapeDtypeStruct(shape, np.uint8)}


def list_videos(directory: str, split: str) -> list[pathlib.Path]:
    """Returns the videos of a split, by a hash of their names."""
    root = pathlib.Path(directory).expanduser()
    if not directory or not root.is_dir():
        fix = "clips needs D/train and D/test, or D, with video files or folders of frames"
        raise UserError(f"config.data.dir = {directory!r}: no such folder; {fix}")
    divided = (root / "train").is_dir()
    top = (root / "train" if split == "train" else split_folder(root, split)) if divided else root
    found = [path for path in top.iterdir() if not path.name.startswith(".")]
    videos = [path for path in found if path.is_dir() or path.suffix.lower() in VIDEOS]
    ordered = sorted((name_digest(os.fsencode(path.name)), path) for path in videos)
    if not divided:
        ordered = [item for item in ordered if is_test_name(item[0]) == (split == "test")]
    if not ordered:
        fix = f"add videos ({', '.join(VIDEOS)}) or folders of frames, or make the folders train and test"
        raise UserError(f"{top}: no video for the {split} split; {fix}")
    return [path for _, path in ordered]


def frame_files(folder: pathlib.Path) -> list[pathlib.Path]:
    """Returns the frames of a video that is a folder, in the order of their names."""
    return sorted(path for path in folder.iterdir() if path.suffix.lower() in EXTENSIONS and path.is_file())


def count_frames(video: pathlib.Path) -> int:
    """Returns the number of frames of a video."""
    if video.is_dir():
        return len(frame_files(video))
    with opened(video) as container:
        stream = container.streams.video[0]
        return stream.frames or sum(packet.size > 0 for packet in container.demux(stream))


def read_frames(video: pathlib.Path, numbers: np.ndarray, data: DataConfig) -> dict[int, np.ndarray]:
    """Returns frames of a video by number, uint8 [size, size, C]: the shorter side resized, the centre cropped."""
    if video.is_dir():
        files = frame_files(video)
        return {int(number): _image(files[number], data) for number in numbers}
    wanted, found = set(map(int, numbers)), {}
    for number, frame in enumerate(_decoded(video)):
        if number in wanted:
            pixels = frame.to_ndarray(format=FORMATS[data.channels]).reshape(frame.height, frame.width, -1)
            found[number] = centre_of(pixels, data.image_size, data.shorter_side)
        if len(found) == len(wanted):
            return found
    missing = min(wanted - found.keys())
    raise UserError(f"{video}: ends before frame {missing}; the file is damaged: remove it")


def _image(file: pathlib.Path, data: DataConfig) -> np.ndarray:
    try:
        return centre_crop(Photo(file.read_bytes(), data.channels), data.image_size, data.shorter_side)
    except Exception as error:  # image libraries raise nearly anything on damaged files
        raise UserError(f"{file}: cannot be read as an image ({error}); remove it") from error


def _decoded(video: pathlib.Path) -> Iterator[Any]:
    with opened(video) as container:
        stream = container.streams.video[0]
        stream.thread_type = "SLICE"  # the processes of the loader are the parallel part
        try:
            yield from container.decode(stream)
        except av().error.FFmpegError as error:
            raise UserError(f"{video}: cannot be decoded ({error}); remove it") from error


def opened(video: pathlib.Path) -> Any:
    """Opens a video file that has a video stream."""
    try:
        container = av().open(str(video))
    except (OSError, av().error.FFmpegError) as error:
        raise UserError(f"{video}: cannot be read as a video ({error}); remove it") from error
    if not container.streams.video:
        container.close()
        raise UserError(f"{video}: holds no video stream; remove it")
    return container


def av() -> Any:
    """Imports PyAV."""
    try:
        import av
    except ImportError:
        raise UserError("data.source = clips: video files need PyAV; pip install 'jepa_jax[video]'") from None
    return av
