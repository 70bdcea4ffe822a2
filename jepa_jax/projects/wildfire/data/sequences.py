"""`fire_sequences`: one .npz file per sequence of fire masks.

A file holds, in the layout [T, H, W, 1] or in the channels-first one:

  fire      [T, H, W, 1] or [1, H, W, T], 0 or 1
  wind      [T, 2] or [2, T], in [0, 1]
  static    [H, W, C] or [C, H, W], in [0, 1]
  target    [H, W, 1] or [1, H, W], 0 or 1; optional: without it, the last frame is the target
  known     like target; optional: 0 where the target is unknown
  valid     [T]; optional: 0 in frames of padding, which may be at either end or at both
  fire_id   text or integer; optional: sequences of one fire share it. Otherwise the name of the file is the fire
"""

import pathlib

import numpy as np

from jepa_jax.base.errors import UserError
from jepa_jax.base.files import user_path
from jepa_jax.config.groups import DataConfig
from jepa_jax.data.contract import sample
from jepa_jax.data.in_memory import Arrays, num_used
from jepa_jax.data.readers.folder import split_folder
from jepa_jax.data.readers.npz import read_npz_file
from jepa_jax.data.readers.undivided import is_test_name, name_digest
from jepa_jax.projects.wildfire.data.buckets import FrameBuckets
from jepa_jax.projects.wildfire.data.element import fire_element

FEWEST_FRAMES = 2  # of history


class FireSequences(FrameBuckets):
    """Sequences of `data.dir` D: D/train and D/test (or D/val), or D alone, where a hash makes 1 fire in 10 a test one.

    Every file is checked when the source is opened, so that none ends a run later; batches read the files again.
    """

    def __init__(self, data: DataConfig, split: str):
        super().__init__(data)
        fires = _fires_of_split(data.dir, split)
        numbers = {fire: number for number, fire in enumerate(sorted(set(fires.values())))}
        if all(file.stem == fire for file, fire in fires.items()):
            self.caveat = (
                f"config.data.dir = {data.dir!r}: no {split} file has a fire_id, so each of the {len(fires):,} counts "
                "as a fire of its own. If several were cut from one fire, give them the same fire_id: otherwise the "
                "model is tested on fires that it was trained on"
            )
        files = [(file, numbers[fire]) for file, fire in fires.items()]
        self._files = [files[i] for i in sample(len(files), num_used(data, split, len(files)))]
        checked = (self._element(index, data.max_frames) for index in range(len(self._files)))
        self._checked_lengths = np.array([int(element["valid"].sum()) for element in checked])

    def __len__(self) -> int:
        return len(self._files)

    @property
    def groups(self) -> np.ndarray:
        return np.array([fire for _, fire in self._files])

    def _element(self, index: int, frames: int) -> Arrays:
        file, fire_id = self._files[index]
        return read_sequence(file, self._size, self._channels, frames, fire_id)

    def _lengths(self) -> np.ndarray:
        return self._checked_lengths


def read_sequence(file: pathlib.Path, size: int, channels: int, frames: int, fire_id: int) -> Arrays:
    """Reads and checks one file.

    Raises:
      UserError: the file does not hold a sequence of `size` pixels, `channels` static channels and at most `frames`
        frames of history, with values in range.
    """
    content = read_npz_file(file)
    for key in ("fire", "wind", "static"):
        if key not in content:
            raise UserError(f"{file}: holds {', '.join(content) or 'nothing'}; add an array named {key}")
    for key in ("fire", "wind", "static", "target", "known", "valid"):
        if key in content and content[key].dtype.kind not in "biuf":
            raise UserError(
                f"{file}: {key} is {content[key].dtype}, expected numbers; convert it when writing the file"
            )
    if content["fire"].shape[::3] == (1, 1):  # of either layout
        _check_length(file, 1 if "target" in content else 0, frames, content)
    content = _channels_last(content, file)
    length = content["fire"].shape[0]
    _check_shape(file, "fire", content["fire"], (length, size, size, 1))
    _check_shape(file, "wind", content["wind"], (length, 2))
    _check_shape(file, "static", content["static"], (size, size, channels))
    for key in ("wind", "static"):
        _check_range(file, key, content[key])
    for key in ("fire", "target", "known", "valid"):
        if key in content and not np.isin(content[key], (0, 1)).all():
            raise UserError(f"{file}: {key} has values other than 0 and 1; mark unknown pixels in the array known")
    used = _valid_frames(file, content.get("valid"), length)
    fire, wind = content["fire"][used, ..., 0], content["wind"][used]
    last = fire[-1][..., None]
    if "target" not in content:
        fire, wind = fire[:-1], wind[:-1]
    _check_length(file, len(fire), frames, content)
    content = {"target": last, "known": np.ones((size, size, 1), np.bool_)} | content
    for key in ("target", "known"):
        _check_shape(file, key, content[key], (size, size, 1))
    target, known = content["target"][..., 0], content["known"][..., 0]
    return fire_element(fire, wind, content["static"], target, known=known, fire_id=fire_id, frames=frames)


def _channels_last(content: Arrays, file: pathlib.Path) -> Arrays:
    """Returns the arrays in the layout [T, H, W, 1]; the shape of `fire` tells which layout the file has."""
    shape = content["fire"].shape
    if len(shape) != 4 or 1 not in (shape[0], shape[3]):
        fixes = {3: "use fire[..., None]", 4: "use fire.transpose(0, 2, 3, 1)" if shape[1:2] == (1,) else ""}
        fix = fixes.get(len(shape)) or "write it so"
        raise UserError(f"{file}: fire has shape {shape}, expected [T, H, W, 1] or [1, H, W, T]; {fix}")
    if shape[3] == 1:
        return content
    moved = {"fire": (3, 1, 2, 0), "wind": (1, 0), "static": (1, 2, 0), "target": (1, 2, 0), "known": (1, 2, 0)}
    for key, axes in moved.items():
        if key in content and content[key].ndim != len(axes):
            raise UserError(f"{file}: {key} has shape {content[key].shape}, expected {len(axes)} axes")
    return content | {key: content[key].transpose(axes) for key, axes in moved.items() if key in content}


def _check_shape(file: pathlib.Path, key: str, array: np.ndarray, expected: tuple[int, ...]) -> None:
    if array.shape != expected:
        fix = _shape_fix(key, array.shape, expected)
        raise UserError(f"{file}: {key} is {array.shape} (channels last), expected {expected}; {fix}")


def _shape_fix(key: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> str:
    """Returns what to do about an array that has not the expected shape, with its channels last."""
    if key == "wind":
        return "give wind and fire as many frames, and wind a speed and a direction for each"
    if shape == expected[:-1]:
        return f"use {key}[..., None]"
    if len(shape) != len(expected):
        return "docs/guides/data.md lists the shapes"
    size, (height, width, channels) = expected[-2], shape[-3:]
    if key != "fire" and (width, channels) == (size, size) != (height, width):
        return f"use {key}.transpose(1, 2, 0)"
    if height != width:
        return "tiles are square: cut or pad them"
    if height != size:
        return f"set --config.data.image_size={height}" if key == "fire" else f"give {key} the side of fire"
    return f"set --config.data.channels={channels}" if key == "static" else "give it one channel"


def _check_range(file: pathlib.Path, key: str, array: np.ndarray) -> None:
    if np.isnan(array).any():
        raise UserError(f"{file}: {key} has {np.isnan(array).sum():,} NaN; fill them when writing the file")
    if array.min() < 0 or array.max() > 1:
        scale = "scale each channel by the same constants in all files"
        if key == "wind":
            scale = "scale the speed by one constant for all files, and divide the direction in degrees by 360"
        raise UserError(f"{file}: {key} is in {array.min():g}..{array.max():g}, expected 0..1; {scale}")


def _check_length(file: pathlib.Path, length: int, frames: int, content: Arrays) -> None:
    if FEWEST_FRAMES <= length <= frames:
        return
    note = "" if "target" in content else " (the last frame is the target)"
    fix = "remove the file" if length < FEWEST_FRAMES else f"cut it, or set --config.data.max_frames={length}"
    raise UserError(f"{file}: has {length} frames of history{note}, expected {FEWEST_FRAMES} to {frames}; {fix}")


def _valid_frames(file: pathlib.Path, valid: np.ndarray | None, length: int) -> slice:
    """Returns which frames are not padding."""
    if valid is None:
        return slice(0, length)
    frames = np.flatnonzero(valid)
    if valid.shape != (length,) or not len(frames) or np.ptp(frames) + 1 != len(frames):
        raise UserError(f"{file}: valid must be [{length}] with one run of ones; padding is at the ends of a sequence")
    return slice(int(frames[0]), int(frames[-1]) + 1)


def _fires_of_split(directory: str, split: str) -> dict[pathlib.Path, str]:
    """Returns the files of a split with the names of their fires; raises UserError if a fire is in both splits."""
    root = user_path(directory, "config.data.dir")
    if not directory or not root.is_dir():
        raise UserError(
            f"config.data.dir = {directory!r}: no such folder; it needs .npz files, in train and test or not"
        )
    if (root / "train").is_dir():
        fires = {name: _fires_below(split_folder(root, name)) for name in ("train", "test")}
        both = set(fires["train"].values()) & set(fires["test"].values())
        if both:
            file = next(file for file, fire in fires["test"].items() if fire in both)
            raise UserError(f"{file}: fire {min(both)} is in both splits; move all its sequences to one of them")
        found = fires[split]
    else:
        whole = _fires_below(root)
        found = {f: fire for f, fire in whole.items() if _is_test_fire(fire) == (split == "test")}
        if whole and not found:
            share = "none falls" if split == "test" else "all fall"
            raise UserError(
                f"config.data.dir = {directory!r}: of its {len(set(whole.values()))} fires, {share} into the tenth for "
                f"testing; make {root / 'train'} and {root / 'test'}"
            )
    if not found:
        raise UserError(f"config.data.dir = {directory!r}: no .npz file for the {split} split; add sequences")
    return found


def _fires_below(folder: pathlib.Path) -> dict[pathlib.Path, str]:
    files = sorted(folder.glob("*.npz"))
    return {file: str(read_npz_file(file, ("fire_id",)).get("fire_id", file.stem)) for file in files}


def _is_test_fire(fire: str) -> bool:
    return is_test_name(name_digest(fire.encode(errors="surrogatepass")))
