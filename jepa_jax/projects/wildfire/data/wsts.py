"""`wsts`: WildfireSpreadTS, real fires of four years, day by day, and where fire is active on the next day.

`data.dir` D holds D/2018 to D/2021, and these one HDF5 file per fire, `<fire>.hdf5` with `data` [days, 23, H, W], or
one folder per fire with a GeoTIFF of 23 bands per day, `<fire>/<date>.tif`. The last band is the time of the last
detection of the day: in HDF5 files the hour, 0 without any, in GeoTIFF files hours * 100 + minutes, or NaN. As in the
HDF5 files, which published results are of, a detection in the hour after midnight counts as none.

Reference: Gerard et al., "WildfireSpreadTS: A dataset of multi-modal time series for wildfire spread prediction",
NeurIPS 2023.
"""

import pathlib
from typing import NamedTuple

import numpy as np

from jepa_jax.base.errors import UserError
from jepa_jax.base.files import user_path
from jepa_jax.config.groups import DataConfig
from jepa_jax.data.contract import ElementNames, Spec
from jepa_jax.data.in_memory import Arrays
from jepa_jax.data.photos.decode import read_tiff
from jepa_jax.data.readers.hdf5 import open_hdf5
from jepa_jax.projects.wildfire.data.element import expected_specs, fire_element, fire_spec, stacked
from jepa_jax.projects.wildfire.data.ndws import mean_wind

BANDS, ACTIVE_FIRE, LAND_COVER = 23, 22, 16
WIND_SPEED, WIND_DIRECTION = 6, 7
DEGREES = (7, 13, 19)  # wind, aspect, forecast wind
LAND_COVERS = 17  # classes 1 to 17 of IGBP
SCALED = tuple(band for band in range(ACTIVE_FIRE) if band not in (*DEGREES, LAND_COVER))
CHANNELS = len(SCALED) + 2 * len(DEGREES) + LAND_COVERS + 1
WIDEST = 5.0  # deviations from the mean that become 0 and 1
FIRST_TARGET = 5  # day of a fire that is predicted first in validation and test, whatever the length of histories
MULTIPLE = 32  # a fire is cropped to sides of this, about its centre, before it is scored
CROPS = 10  # of which that with most fire is trained on
# Two years for training, one for validation and one for testing.
FOLDS: tuple[tuple[int, ...], ...] = (
    (2018, 2019, 2020, 2021), (2018, 2019, 2021, 2020), (2018, 2020, 2019, 2021), (2018, 2020, 2021, 2019),
    (2018, 2021, 2019, 2020), (2018, 2021, 2020, 2019), (2019, 2020, 2018, 2021), (2019, 2020, 2021, 2018),
    (2019, 2021, 2018, 2020), (2019, 2021, 2020, 2018), (2020, 2021, 2018, 2019), (2020, 2021, 2019, 2018),
)  # fmt: skip
YEARS = {"train": slice(0, 2), "validation": slice(2, 3), "test": slice(3, 4)}
# Mean and deviation of each band in SCALED by years of training, as published.
STATISTICS: dict[tuple[int, ...], tuple[tuple[float, ...], tuple[float, ...]]] = {
    (2018, 2019): (
        (1959, 2944, 1803, 4188, 2201, 0.4756, 3.404, 282.5, 299.3, 68.12,
         0.005481, 6.727, 1534, -1.136, 18.49, 1.594, 18.4, 0.005574),
        (1137, 1637, 1893, 2211, 1128, 2.153, 1.395, 6.87, 7.966, 18.97,
         0.002108, 6.755, 769.8, 1.883, 43.29, 1.078, 6.986, 0.001924),
    ),
    (2018, 2020): (
        (1925, 2906, 1798, 4179, 2166, 0.4318, 3.531, 282.8, 299.4, 70.67,
         0.005321, 6.851, 1515, -1.691, 11.4, 1.645, 18.42, 0.005342),
        (1138, 1611, 1869, 2223, 1098, 2.211, 1.522, 7.479, 8.452, 19.33,
         0.002178, 6.688, 797, 1.83, 33.09, 1.196, 7.377, 0.001904),
    ),
    (2018, 2021): (
        (1890, 2969, 1807, 4505, 2315, 0.5026, 3.45, 282.8, 299.4, 68.4,
         0.005541, 7.72, 1519, -2.878, 9.272, 1.502, 18.55, 0.005475),
        (1175, 1684, 1987, 2245, 1124, 2.268, 1.37, 6.5, 7.631, 18.95,
         0.001999, 7.109, 728.7, 1.618, 33.26, 1.031, 6.563, 0.001679),
    ),
    (2019, 2020): (
        (1932, 2914, 1837, 4090, 2100, 0.495, 3.536, 283.4, 299.6, 69.7,
         0.005458, 6.509, 1445, -0.8592, 8.84, 1.675, 18.61, 0.005381),
        (1123, 1639, 1888, 2148, 1031, 2.256, 1.531, 8.02, 8.954, 20.44,
         0.002308, 6.441, 775.1, 1.754, 17.7, 1.213, 7.87, 0.002065),
    ),
    (2019, 2021): (
        (1881, 3007, 1856, 4561, 2312, 0.5998, 3.422, 283.4, 299.6, 66.41,
         0.00578, 7.733, 1446, -2.501, 5.627, 1.473, 18.81, 0.005575),
        (1177, 1749, 2061, 2169, 1063, 2.338, 1.31, 6.732, 7.866, 19.99,
         0.002073, 7.044, 670.7, 1.418, 16.64, 0.973, 6.801, 0.001777),
    ),
    (2020, 2021): (
        (1876, 2946, 1832, 4418, 2235, 0.5142, 3.539, 283.4, 299.6, 69.48,
         0.005521, 7.507, 1458, -2.571, 3.195, 1.565, 18.69, 0.005348),
        (1163, 1683, 1977, 2197, 1053, 2.329, 1.468, 7.38, 8.378, 19.98,
         0.002154, 6.883, 735.2, 1.534, 8.561, 1.133, 7.254, 0.001809),
    ),
}  # fmt: skip


class Fire(NamedTuple):
    """The files of one fire: one HDF5 file, or a GeoTIFF for each day."""

    files: tuple[pathlib.Path, ...]
    days: int
    height: int
    width: int


class Square(NamedTuple):
    """A part of a map, and which of its pixels count, counted from its own corner."""

    place: tuple[slice, slice]
    counted: tuple[slice, slice]


class WstsSource:
    """Days of the fires in the years of fold `data.fold`; the history of a day is the `data.max_frames` before it.

    For training, a day is one square: of CROPS places that with most fire to predict. For validation and testing, a day
    is as many squares as cover the fire, and each pixel counts once.

    The bands of the last day of history are static channels: standardised as published and clipped; sines and cosines
    of degrees; the class of land cover, one of 17; the hour of the last detection. What is missing has the mean, and
    wind is the mean of the square.
    """

    classes = ()
    own_validation = True
    element_names = ElementNames("squares", "fires")

    @staticmethod
    def expected_specs(data: DataConfig) -> list[Spec]:
        return expected_specs(data)[-1:]  # all histories have one length

    def __init__(self, data: DataConfig, split: str):
        if data.fold >= len(FOLDS):
            raise UserError(f"config.data.fold = {data.fold}: wsts has the folds 0 to {len(FOLDS) - 1}")
        if data.channels != CHANNELS:
            raise UserError(
                f"config.data.channels = {data.channels}: wsts makes {CHANNELS} maps of a day; "
                f"set data.channels = {CHANNELS}"
            )
        years = FOLDS[data.fold]
        self._size, self._frames, self._seed = data.image_size, data.max_frames, data.seed
        self._scale = [np.array(values, np.float32)[:, None, None] for values in STATISTICS[years[:2]]]
        self._train = split == "train"
        self.spec = fire_spec(data.image_size, CHANNELS, data.max_frames)
        root = user_path(data.dir, "config.data.dir")
        self._fires = [fire for year in years[YEARS[split]] for fire in list_fires(root / str(year))]
        first = data.max_frames if self._train else max(FIRST_TARGET, data.max_frames)
        self._places = [
            (number, day, square)
            for number, fire in enumerate(self._fires)
            for square in range(1 if self._train else len(squares(fire, self._size)))
            for day in range(first, fire.days)
        ]
        if not self._places:
            raise UserError(f"config.data.dir = {data.dir!r}: no fire of the {split} years has more than {first} days")

    def __len__(self) -> int:
        return len(self._places)

    @property
    def groups(self) -> np.ndarray:
        return np.array([number for number, *_ in self._places])

    def batch(self, indices: np.ndarray) -> Arrays:
        return stacked([self._element(*self._places[index]) for index in indices])

    def _element(self, number: int, day: int, square: int) -> Arrays:
        fire, size = self._fires[number], self._size
        place, counted = self._crop(number, day) if self._train else squares(fire, size)[square]
        days = read_days(fire, slice(day - self._frames, day + 1), place)
        missing = [(0, size - side) for side in days.shape[2:]]
        days = np.pad(days, ((0, 0), (0, 0), *missing), constant_values=np.nan)
        hours = np.nan_to_num(days[:, ACTIVE_FIRE])
        known = np.zeros((size, size), bool)
        known[counted] = True
        return fire_element(
            hours[:-1] > 0,
            np.stack([_wind(one) for one in days[:-1]]),
            self._static(days[-2], hours[-2]),
            hours[-1] > 0,
            known=known,
            fire_id=number,
            frames=self._frames,
        )

    def _crop(self, number: int, day: int) -> Square:
        """Returns the best of some random squares; fire that is active before counts little."""
        fire, rng = self._fires[number], np.random.default_rng((self._seed, number, day))
        before, after = np.nan_to_num(read_days(fire, slice(day - 1, day + 1))[:, ACTIVE_FIRE]) > 0
        drawn = []
        for _ in range(CROPS):
            corner = [int(rng.integers(max(0, side - self._size) + 1)) for side in after.shape]
            place = tuple(slice(first, first + self._size) for first in corner)
            drawn.append((1000 * after[place].sum() + before[place].sum(), corner, place))
        *_, (rows, columns) = max(drawn)
        whole = slice(0, fire.height - rows.start), slice(0, fire.width - columns.start)
        return Square((rows, columns), whole)

    def _static(self, bands: np.ndarray, hours: np.ndarray) -> np.ndarray:
        mean, deviation = self._scale
        scaled = np.clip((bands[list(SCALED)] - mean) / deviation / (2 * WIDEST) + 0.5, 0, 1)
        angles = np.deg2rad(bands[list(DEGREES)])
        cover = np.nan_to_num(bands[LAND_COVER]).astype(np.int64) == np.arange(1, LAND_COVERS + 1)[:, None, None]
        maps = np.concatenate([scaled, (1 + np.sin(angles)) / 2, (1 + np.cos(angles)) / 2, cover, hours[None] / 24])
        return np.moveaxis(np.nan_to_num(maps, nan=0.5), 0, -1)


def squares(fire: Fire, size: int) -> list[Square]:
    """Returns squares that cover the middle of a fire; the last ones of a row and of a column overlap others."""
    rows, columns = _spans(fire.height, size), _spans(fire.width, size)
    return [Square((row, column), (own, also)) for row, own in rows for column, also in columns]


def _spans(length: int, size: int) -> list[tuple[slice, slice]]:
    kept = length // MULTIPLE * MULTIPLE or length
    border = round((length - kept) / 2)
    spans = []
    for start in range(0, kept, size):
        first = max(0, min(start, kept - size))
        end = min(start + size, kept)
        spans.append((slice(border + first, border + min(first + size, kept)), slice(start - first, end - first)))
    return spans


def _wind(bands: np.ndarray) -> np.ndarray:
    speed, degrees = bands[WIND_SPEED], bands[WIND_DIRECTION]
    measured = ~np.isnan(speed + degrees)
    return mean_wind(speed[measured], degrees[measured]) if measured.any() else np.zeros(2)


def list_fires(folder: pathlib.Path) -> list[Fire]:
    """Returns the fires of one year by name; raises UserError if there is none, or for a file of another layout."""
    fires = []
    for path in sorted(folder.glob("*")):
        if path.suffix == ".hdf5":
            with open_hdf5(path) as stored:
                shape: tuple[int, ...] = stored["data"].shape if "data" in stored else ()
            if len(shape) != 4 or shape[1] != BANDS:
                raise UserError(
                    f"{path}: data is {list(shape)}, expected [days, {BANDS}, height, width]; write it anew"
                )
            fires.append(Fire((path,), shape[0], *shape[2:]))
        elif path.is_dir() and (files := sorted(path.glob("*.tif"))):
            fires.append(Fire(tuple(files), len(files), *_read_tiff(files[0]).shape[1:]))
    if not fires:
        raise UserError(f"{folder}: holds no fire; wsts needs <year>/<fire>.hdf5 or <year>/<fire>/<date>.tif")
    return fires


def read_days(fire: Fire, days: slice, place: tuple[slice, slice] = (slice(None), slice(None))) -> np.ndarray:
    """Returns the bands [days, 23, h, w] of a part of a fire in float32, with hours in the last one."""
    if len(fire.files) == 1 and fire.files[0].suffix == ".hdf5":
        with open_hdf5(fire.files[0]) as stored:
            return np.asarray(stored["data"][(days, slice(None), *place)], np.float32)
    maps = []
    for file in fire.files[days]:
        bands = _read_tiff(file)
        if bands.shape[1:] != (fire.height, fire.width):
            raise UserError(
                f"{file}: is {list(bands.shape[1:])}, and other days {[fire.height, fire.width]}; remove it"
            )
        maps.append(bands[(slice(None), *place)])
    read = np.stack(maps).astype(np.float32)
    read[:, ACTIVE_FIRE] //= 100  # hours of hhmm
    return read


def _read_tiff(file: pathlib.Path) -> np.ndarray:
    try:
        bands = read_tiff(file.read_bytes(), BANDS)
    except (ValueError, OSError, KeyError, IndexError) as error:
        raise UserError(f"{file}: cannot be read as TIFF ({error}); write it again") from error
    if bands.ndim != 3 or bands.shape[2] != BANDS:
        raise UserError(f"{file}: is {list(bands.shape)}, expected {BANDS} bands; write it again")
    return np.moveaxis(bands, -1, 0)
