"""`shapes`: a procedural data set of ten classes, rendered by vectorised numpy; it needs no download.

Every picture repeats one motif (disc, ring, star, ...) on a rotated, jittered grid, or fills the grid with one pattern
(stripes, checker, ...), so that any crop of it shows the class. Colours, contrast and its sign, size, angle, lighting
and noise are independent of the class: raw pixels and untrained features say little about it, while two crops of a
picture share the motif.
"""

import functools
from typing import Any

import numpy as np

from jepa_jax.base.errors import UserError
from jepa_jax.config.groups import DataConfig
from jepa_jax.data.contract import image_spec
from jepa_jax.data.in_memory import Arrays

CLASSES = ("disc", "ring", "triangle", "cross", "star", "dots", "stripes", "waves", "checker", "grid")
TILED = ("stripes", "waves", "checker", "grid")  # fill the plane; the others are single figures, one per cell
SMALLEST = 8  # pixels per side
CHUNK_PIXELS = 1 << 18  # pictures are rendered in blocks that stay in the cache
MEMORY_LIMIT_BYTES = 1 << 30  # a larger set is drawn batch by batch
SPLIT_STREAMS = {"train": 1, "test": 2}


# How hard the set is; colours are fractions of full scale.
CELLS = (1.8, 2.8)  # motifs along one side of the picture
RADIUS = (0.38, 0.46)  # of a figure, in cells
CONTRAST = (0.35, 0.8)  # luminance between motif and ground, of either sign
CHROMA = 0.1  # colour added to motif and to ground, independently
LIGHTING = 0.1  # colour change from the centre to the edge
NOISE = 0.03  # standard deviation per pixel

_TABLE = 4  # motif angle, size and place repeat every 4 x 4 cells, further than a picture reaches
_CELL_DRAWS = 5  # the last one is unused; drawing it keeps the pictures of earlier versions


def drawn_count(data: DataConfig, split: str) -> int:
    """Returns how many elements of a split a synthetic source is asked for, which has no number of its own."""
    count = data.num_train if split == "train" else data.num_test
    if count == 0:
        fix = "say how many, for example 4096"
        raise UserError(f"config.data.num_{split} = 0: {data.source} is drawn on demand; {fix}")
    return count


class ShapesSource:
    """Shapes that are drawn on first use and kept in memory if all of them fit, or else drawn batch by batch."""

    classes = CLASSES
    synthetic = True

    def __init__(self, data: DataConfig, split: str):
        self._count = drawn_count(data, split)
        if data.image_size < SMALLEST:
            raise UserError(f"config.data.image_size = {data.image_size}: shapes need at least {SMALLEST} pixels")
        if data.channels != 3:
            raise UserError(f"config.data.channels = {data.channels}: shapes have 3 channels; set data.channels = 3")
        self._render = functools.partial(render_shapes, size=data.image_size, seed=data.seed, split=split)
        self._drawn: Arrays | None = None
        self.spec = image_spec(data.image_size)

    def __len__(self) -> int:
        return self._count

    @property
    def labels(self) -> np.ndarray:
        return np.arange(self._count) % len(CLASSES)

    def batch(self, indices: np.ndarray) -> Arrays:
        if self._count * self.spec["image"].size > MEMORY_LIMIT_BYTES:
            return self._render(indices)
        if self._drawn is None:
            self._drawn = self._render(np.arange(self._count))
        return {key: array[indices] for key, array in self._drawn.items()}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_drawn": None}


def render_shapes(indices: np.ndarray, *, size: int, seed: int, split: str) -> Arrays:
    """Draws images uint8 [N, size, size, 3] and labels int32 [N]; each depends on (seed, split, index) alone."""
    indices = np.asarray(indices, np.int64)
    images = np.empty((len(indices), size, size, 3), np.uint8)
    labels = (indices % len(CLASSES)).astype(np.int32)
    bank = _noise_bank(size)
    chunk = max(1, CHUNK_PIXELS // size**2)
    for start in range(0, len(indices), chunk):
        part = slice(start, start + chunk)
        images[part] = _render(indices[part], labels[part], size, _stream(seed, split), bank)
    return {"image": images, "label": labels}


def _render(indices: np.ndarray, labels: np.ndarray, size: int, stream: np.uint64, bank: np.ndarray) -> np.ndarray:
    draws = _Draws(stream, indices)
    axis = ((np.arange(size, dtype=np.float32) + 0.5) / size - 0.5)[None]  # [1, S]
    x, y = axis[:, None, :], axis[:, :, None]
    motif = _motif_coverage(draws, labels, x, y, size)  # [N, S, S]
    ground, ink = _colours(draws)  # [N, 3]
    # Channels first while compositing: numpy is slow on an inner axis of 3.
    image = motif[:, None] * (ink - ground)[:, :, None, None]
    image += ground[:, :, None, None]
    image += _lighting(draws, x, y)
    if NOISE:
        offsets = draws.integers(len(bank) - 3 * size * size)
        windows = np.lib.stride_tricks.sliding_window_view(bank, 3 * size * size)
        image += (windows[offsets] * np.float32(NOISE)).reshape(image.shape)
    np.clip(image, 0, 1, out=image)
    image *= 255
    image += 0.5
    return image.astype(np.uint8).transpose(0, 2, 3, 1)


def _motif_coverage(draws: "_Draws", labels: np.ndarray, x: np.ndarray, y: np.ndarray, size: int) -> np.ndarray:
    """Returns how much of each pixel the motif covers, in [0, 1]; [N, S, S]."""
    n = len(labels)
    cells = draws.uniform(*CELLS)
    angle = draws.uniform(0, 2 * np.pi)
    cos, sin = _column(np.cos(angle) * cells), _column(np.sin(angle) * cells)
    u = cos * x + sin * y + _column(draws.uniform(0, _TABLE))
    v = cos * y - sin * x + _column(draws.uniform(0, _TABLE))
    column, row = np.floor(u), np.floor(v)
    u -= column + np.float32(0.5)
    v -= row + np.float32(0.5)

    # One row of parameters per cell, looked up by pixel.
    table = draws.table(_TABLE * _TABLE, _CELL_DRAWS)  # [N, cells, draws]
    radius = _between(table[..., 0], RADIUS)
    spin = table[..., 1] * np.float32(2 * np.pi)
    shift_u, shift_v = ((table[..., i] - np.float32(0.5)) * (1 - 2 * radius).clip(0) for i in (2, 3))
    tiled = np.isin(labels, [CLASSES.index(name) for name in TILED])
    for values, whole_cell in ((radius, 0.5), (spin, 0), (shift_u, 0), (shift_v, 0)):
        values[tiled] = whole_cell
    cell = (row.astype(np.int32) % _TABLE) * _TABLE + column.astype(np.int32) % _TABLE
    cell += (np.arange(n, dtype=np.int32) * _TABLE * _TABLE)[:, None, None]
    u -= shift_u.ravel()[cell]
    v -= shift_v.ravel()[cell]
    c, s = (np.cos(spin) / radius).ravel()[cell], (np.sin(spin) / radius).ravel()[cell]
    u, v = c * u + s * v, c * v - s * u  # motif units: a figure lies within the unit disc, a tile in [-1, 1]^2

    distance = np.empty((n, size, size), np.float32)
    for label in np.unique(labels):
        rows = labels == label
        distance[rows] = MOTIFS[CLASSES[label]](u[rows], v[rows])
    pixels_per_unit = (radius * (size / cells)[:, None]).ravel()[cell]
    return np.clip(np.float32(0.5) - distance * pixels_per_unit, 0, 1)


def _colours(draws: "_Draws") -> tuple[np.ndarray, np.ndarray]:
    """Returns ground and ink [N, 3]: light on dark or dark on light with equal odds, independent of the class."""
    middle = draws.uniform(0.35, 0.65)
    half = 0.5 * draws.uniform(*CONTRAST) * np.where(draws.uniform(0, 1) < 0.5, -1, 1).astype(np.float32)
    ground = np.stack([draws.uniform(-CHROMA, CHROMA) for _ in range(3)], -1)
    ink = np.stack([draws.uniform(-CHROMA, CHROMA) for _ in range(3)], -1)
    return ground + (middle - half)[:, None], ink + (middle + half)[:, None]


def _lighting(draws: "_Draws", x: np.ndarray, y: np.ndarray) -> np.ndarray:
    angle = draws.uniform(0, 2 * np.pi)
    ramp = _column(np.cos(angle)) * x + _column(np.sin(angle)) * y
    strength = np.stack([draws.uniform(-2 * LIGHTING, 2 * LIGHTING) for _ in range(3)], -1)
    return ramp[:, None] * strength[:, :, None, None]


def _star(u: np.ndarray, v: np.ndarray) -> np.ndarray:
    r = np.sqrt(u * u + v * v) + np.float32(1e-6)
    c = u / r
    five = c * (5 + c * c * (16 * c * c - 20))  # cos(5 angle)
    return (r - (np.float32(0.66) + np.float32(0.3) * five)) * np.float32(0.6)


def _checker(u: np.ndarray, v: np.ndarray) -> np.ndarray:
    to_edge = np.minimum(np.minimum(np.abs(u), 1 - np.abs(u)), np.minimum(np.abs(v), 1 - np.abs(v)))
    return to_edge * np.sign(u) * np.sign(v)


def _waves(u: np.ndarray, v: np.ndarray) -> np.ndarray:
    bent = u + np.float32(0.5) * np.sin(np.float32(np.pi) * v)
    return np.abs(bent - 2 * np.round(bent * np.float32(0.5))) - 0.5


# Signed distance to the outline of each motif, negative inside. Figures have similar areas (about half the unit disc),
# patterns cover half a tile, so that the amount of ink does not tell the class.
MOTIFS = {
    "disc": lambda u, v: np.hypot(u, v) - 0.71,
    "ring": lambda u, v: np.abs(np.hypot(u, v) - 0.70) - 0.18,
    "triangle": lambda u, v: np.maximum(v, np.abs(u) * 0.866 - v * 0.5) - 0.55,
    "cross": lambda u, v: np.maximum(np.minimum(np.abs(u), np.abs(v)) - 0.25, np.maximum(np.abs(u), np.abs(v)) - 0.9),
    "star": _star,
    "dots": lambda u, v: np.hypot(np.abs(u) - 0.5, np.abs(v) - 0.5) - 0.34,
    "stripes": lambda u, v: np.abs(u) - 0.5,
    "waves": _waves,
    "checker": _checker,
    "grid": lambda u, v: 0.71 - np.maximum(np.abs(u), np.abs(v)),
}


def _between(fraction: np.ndarray, low_high: tuple[float, float]) -> np.ndarray:
    low, high = low_high
    return np.float32(low) + fraction * np.float32(high - low)


def _column(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float32)[:, None, None]


# Counter-based random numbers (SplitMix64): sample i needs no sample before it, and whole columns are drawn at once.
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(z: Any) -> Any:
    z = np.asarray(z, np.uint64)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _stream(seed: int, split: str) -> np.uint64:
    with np.errstate(over="ignore"):
        return _mix(_mix(np.uint64(seed % 2**64) + _GOLDEN) + np.uint64(SPLIT_STREAMS[split]) * _GOLDEN)


class _Draws:
    """Draws uniform numbers for each sample; every call takes the next column."""

    def __init__(self, stream: np.uint64, indices: np.ndarray):
        with np.errstate(over="ignore"):
            self._keys = _mix(stream + (indices.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
        self._column = 0

    def table(self, rows: int, columns: int) -> np.ndarray:
        """Draws float32 [N, rows, columns] in [0, 1)."""
        counters = np.arange(self._column, self._column + rows * columns, dtype=np.uint64) + np.uint64(1)
        self._column += rows * columns
        bits = _mix(self._keys[:, None] + counters * _GOLDEN) >> np.uint64(40)
        return (bits.astype(np.float32) * np.float32(2.0**-24)).reshape(-1, rows, columns)

    def uniform(self, low: float, high: float) -> np.ndarray:
        return _between(self.table(1, 1)[:, 0, 0], (low, high))

    def integers(self, high: int) -> np.ndarray:
        return (self.table(1, 1)[:, 0, 0].astype(np.float64) * high).astype(np.int64)


@functools.lru_cache(maxsize=2)
def _noise_bank(size: int) -> np.ndarray:
    """Draws the noise of which every picture takes a window; fresh noise would cost more than all other drawing."""
    return np.random.default_rng(0).standard_normal(max(1 << 19, 8 * 3 * size * size), np.float32)
