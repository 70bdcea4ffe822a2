"""`ndws`: tiles of Next Day Wildfire Spread, which have one frame of history.

`data.dir` D holds D/train and D/test (or D/val) with .npz tiles (`inputs` [12, 64, 64] in the order of D/channels.json,
`targets` [1, 64, 64]), or the public TFRecord files: *_train_*.tfrecord, and *_test_*.tfrecord or *_eval_*.tfrecord.

Masks are -1 where nothing is known. `known` is False there, for the mask of either day.
"""

import json
import pathlib

import numpy as np

from jepa_jax.base.errors import UserError
from jepa_jax.base.files import user_path
from jepa_jax.config.groups import DataConfig
from jepa_jax.data.contract import Spec, sample
from jepa_jax.data.in_memory import Arrays, check_image_size, num_used
from jepa_jax.data.readers.bounded import open_regular
from jepa_jax.data.readers.folder import split_folder
from jepa_jax.data.readers.npz import read_npz_file
from jepa_jax.projects.wildfire.data.element import expected_specs, fire_element, fire_spec, stacked
from jepa_jax.projects.wildfire.data.tfrecord import float_features, read_record, record_offsets

SIZE = 64
MOST_JSON_BYTES = 1 << 16
BEFORE, AFTER = "PrevFireMask", "FireMask"
# Values that become 0 and 1; those beyond are clipped. They are the limits that the authors of the data set clip at,
# except for sph, which they leave at 1 although it hardly exceeds 0.02.
RANGES = {
    "elevation": (0, 3141),  # m
    "NDVI": (-9821, 9996),
    "erc": (0, 106.25),
    "pdsi": (-6.13, 7.876),
    "population": (0, 2534.06),  # per km2
    "pr": (0, 44.53),  # mm
    "sph": (0, 0.02),  # kg / kg
    "th": (0, 360),  # degrees clockwise from north, where the wind comes from
    "tmmn": (253.15, 298.949),  # K
    "tmmx": (253.15, 315.092),  # K
    "vs": (0, 10.0243),  # m / s
}
TEST_NAMES = ("test", "eval")


class NdwsSource:
    """Tiles with their weather as static channels, in the order of RANGES, and its mean over the tile as wind.

    Files are read batch by batch. A tile is its own fire: the data set does not say which tiles show the same one.
    """

    classes = ()

    @staticmethod
    def expected_specs(data: DataConfig) -> list[Spec]:
        return expected_specs(data)[-1:]  # all histories have one length

    def __init__(self, data: DataConfig, split: str):
        check_image_size(SIZE, SIZE, data)
        if data.channels != len(RANGES):
            raise UserError(
                f"config.data.channels = {data.channels}: ndws has {len(RANGES)} channels besides the fire masks; "
                f"set data.channels = {len(RANGES)}"
            )
        self._frames = data.max_frames
        self.spec = fire_spec(SIZE, len(RANGES), data.max_frames)
        self._order, tiles = _list_tiles(data.dir, split)
        self._tiles = [tiles[i] for i in sample(len(tiles), num_used(data, split, len(tiles)))]

    def __len__(self) -> int:
        return len(self._tiles)

    @property
    def groups(self) -> np.ndarray:
        return np.arange(len(self))

    def batch(self, indices: np.ndarray) -> Arrays:
        return stacked([self._element(int(index)) for index in indices])

    def _element(self, index: int) -> Arrays:
        file, offset = self._tiles[index]
        maps = _read_tile(file, self._order) if self._order else _read_example(file, offset)
        _check_maps(maps, file)
        static = [np.clip((maps[name] - low) / (high - low), 0, 1) for name, (low, high) in RANGES.items()]
        return fire_element(
            maps[BEFORE][None] == 1,
            mean_wind(maps["vs"], maps["th"])[None],
            np.stack(static, -1),
            maps[AFTER] == 1,
            known=(maps[BEFORE] >= 0) & (maps[AFTER] >= 0),
            fire_id=index,
            frames=self._frames,
        )


def mean_wind(speed: np.ndarray, degrees: np.ndarray) -> np.ndarray:
    """Returns [2]: the mean speed of a tile, scaled by RANGES, and its mean direction as a fraction of the circle."""
    angle = np.deg2rad(degrees.astype(np.float64))
    direction = np.arctan2(np.sin(angle).mean(), np.cos(angle).mean()) / (2 * np.pi) % 1
    return np.array([np.clip(speed.mean() / RANGES["vs"][1], 0, 1), direction])


def _check_maps(maps: Arrays, file: pathlib.Path) -> None:
    for name in (*RANGES, BEFORE, AFTER):
        if name not in maps or maps[name].size != SIZE * SIZE:
            raise UserError(f"{file}: has no map {name} of {SIZE} x {SIZE} values; remove the tile")
        if maps[name].dtype.kind not in "biuf" or not np.isfinite(maps[name]).all():
            raise UserError(f"{file}: {name} has values that are not numbers; remove the tile")
    for name in (BEFORE, AFTER):
        if not np.isin(maps[name], (-1, 0, 1)).all():
            raise UserError(f"{file}: {name} has values other than -1, 0 and 1; remove the tile")


def _read_tile(file: pathlib.Path, order: tuple[str, ...]) -> Arrays:
    content = read_npz_file(file)
    inputs, targets = content.get("inputs"), content.get("targets")
    if inputs is None or targets is None or inputs.shape != (len(order), SIZE, SIZE) or targets.size != SIZE * SIZE:
        shapes = {key: array.shape for key, array in content.items()}
        expected = f"inputs ({len(order)}, {SIZE}, {SIZE}) and targets (1, {SIZE}, {SIZE})"
        raise UserError(f"{file}: holds {shapes}, expected {expected}; remove the tile")
    return dict(zip(order, inputs, strict=True)) | {AFTER: targets.reshape(SIZE, SIZE)}


def _read_example(file: pathlib.Path, offset: int) -> Arrays:
    try:
        maps = float_features(read_record(file, offset))
    except ValueError as error:
        raise UserError(f"{file}: the record at byte {offset} is no tf.train.Example ({error})") from error
    return {name: values.reshape(SIZE, SIZE) if values.size == SIZE * SIZE else values for name, values in maps.items()}


def _list_tiles(directory: str, split: str) -> tuple[tuple[str, ...], list[tuple[pathlib.Path, int]]]:
    """Returns the order of channels, () for TFRecord files, and the tiles of a split as (file, byte offset)."""
    root = user_path(directory, "config.data.dir")
    if not directory or not root.is_dir():
        raise UserError(f"config.data.dir = {directory!r}: no such folder; it needs TFRecord files or train and test")
    if (root / "train").is_dir():
        order = _channel_order(root / "channels.json")
        tiles = [(file, 0) for file in sorted(split_folder(root, split).glob("*.npz"))]
    else:
        named = [sorted(root.glob(f"*_{name}_*.tfrecord")) for name in (TEST_NAMES if split == "test" else ("train",))]
        files = next((files for files in named if files), [])
        order, tiles = (), [(file, offset) for file in files for offset in record_offsets(file)]
    if not tiles:
        raise UserError(f"config.data.dir = {directory!r}: no tile of the {split} split; see the guide on data")
    return order, tiles


def _channel_order(file: pathlib.Path) -> tuple[str, ...]:
    try:
        with open_regular(file) as stream:
            order = tuple(map(str, json.loads(stream.read(MOST_JSON_BYTES))))
    except (ValueError, TypeError, RecursionError) as error:
        raise UserError(f"{file}: not a readable list of channels ({error})") from error
    if sorted(order) != sorted((*RANGES, BEFORE)):
        expected = ", ".join((*RANGES, BEFORE))
        raise UserError(f"{file}: lists {', '.join(order)[:200]}; expected {expected} in any order")
    return order
