"""`wildfire`: sequences cut from simulated fires; it needs no download."""

from typing import Any

import numpy as np

from jepa_jax.base.errors import UserError
from jepa_jax.config.groups import DataConfig
from jepa_jax.data.in_memory import Arrays
from jepa_jax.data.synthetic import MEMORY_LIMIT_BYTES, SPLIT_STREAMS, drawn_count
from jepa_jax.projects.wildfire.data.buckets import FrameBuckets
from jepa_jax.projects.wildfire.data.element import fire_element
from jepa_jax.projects.wildfire.data.simulator import FRAMES, Fire, simulate_fire

CHANNELS = 3  # elevation, slope, fuel
SMALLEST = 16  # pixels per side
SEQUENCES_PER_FIRE = 4
LENGTHS = np.arange(2, FRAMES - 1)  # frames of history, 2..20
LENGTH_ODDS = 0.85**LENGTHS / (0.85**LENGTHS).sum()  # more than half of the sequences have at most 6 frames


class WildfireSource(FrameBuckets):
    """Histories of 2 to 20 frames, of which the last `data.max_frames` are given, and the next mask.

    Sequence i belongs to fire i // SEQUENCES_PER_FIRE of its split and depends on (data.seed, split, i) alone. Fires
    are simulated on first use and kept in memory if all of them fit.
    """

    synthetic = True

    def __init__(self, data: DataConfig, split: str):
        self._count = drawn_count(data, split)
        if data.image_size < SMALLEST:
            raise UserError(f"config.data.image_size = {data.image_size}: wildfire needs at least {SMALLEST} pixels")
        if data.channels != CHANNELS:
            raise UserError(
                f"config.data.channels = {data.channels}: the static data of wildfire are elevation, slope and fuel; "
                f"set data.channels = {CHANNELS}"
            )
        super().__init__(data)
        self._stream = (data.seed, SPLIT_STREAMS[split])
        self._memory: Fire | None = None  # of all fires, one after the other
        self._simulated = np.zeros(-(-self._count // SEQUENCES_PER_FIRE), bool)

    def __len__(self) -> int:
        return self._count

    @property
    def groups(self) -> np.ndarray:
        return np.arange(self._count) // SEQUENCES_PER_FIRE

    def _element(self, index: int, frames: int) -> Arrays:
        number = index // SEQUENCES_PER_FIRE
        fire = self._fire(number)
        start, end = self._history(index)
        history = slice(start, end)
        return fire_element(
            fire.masks[history],
            fire.wind[history],
            fire.static,
            fire.masks[end],
            fire_id=number,
            frames=frames,
        )

    def _history(self, index: int) -> tuple[int, int]:
        """Returns the first frame of a sequence and the one to predict."""
        rng = np.random.default_rng([*self._stream, 1, index])
        length = int(rng.choice(LENGTHS, p=LENGTH_ODDS))
        end = length + int(rng.integers(FRAMES - length))
        return end - min(length, self._frames), end

    def _lengths(self) -> np.ndarray:
        return np.array([end - start for start, end in map(self._history, range(len(self)))])

    def _fire(self, number: int) -> Fire:
        if self._memory is not None and self._simulated[number]:
            return Fire(*(values[number] for values in vars(self._memory).values()))
        fire = simulate_fire(np.random.default_rng([*self._stream, 0, number]), self._size)
        arrays, fires = vars(fire).values(), len(self._simulated)
        if fires * sum(array.nbytes for array in arrays) > MEMORY_LIMIT_BYTES:
            return fire
        if self._memory is None:
            # All of it is taken at once: memory that grows with every batch would look like a leak.
            self._memory = Fire(*(np.full((fires, *array.shape), 0, array.dtype) for array in arrays))
        for values, array in zip(vars(self._memory).values(), arrays, strict=True):
            values[number] = array
        self._simulated[number] = True
        return fire

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_memory": None, "_simulated": np.zeros_like(self._simulated)}
