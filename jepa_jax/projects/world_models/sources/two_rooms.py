"""`two_rooms`: random walks of a dot through two rooms, made on the fly; it needs no download."""

import functools

import jax
import numpy as np
import scipy.special
import scipy.stats

from jepa_jax.base.errors import UserError
from jepa_jax.config.groups import DataConfig
from jepa_jax.data.contract import ElementNames
from jepa_jax.data.in_memory import Arrays
from jepa_jax.data.synthetic import SPLIT_STREAMS, drawn_count
from jepa_jax.projects.world_models.control.two_rooms import (
    HALF_DOOR,
    HIGH,
    LAYOUTS,
    LONGEST_STEP,
    LOW,
    Layout,
    out_of_wall,
    picture,
    walked,
)

CHANNELS, SIZES = 2, (33, 65)
ACTIONS = 90  # of a walk, of which a window is given
STEP_MEAN, STEP_STD, SHORTEST_STEP = 1.0, 0.4, 0.2
CONCENTRATION = 5.0  # of the change of direction (von Mises)
THROUGH_DOOR = 0.35  # share of walks that are made to pass the door
DOOR_STD = 1.4  # of the height at which they do
WIDEST_ANGLE = np.pi / 4  # at which they leave the door
TEST_LAYOUTS = 0.1  # share
LAYOUT_STREAM, TABLE = 3, 4096  # random stream that deals layouts to splits; entries of a table of quantiles


class TwoRooms:
    """Windows of random walks, each of its own walk, in the rooms of its split.

    An element has the arrays named in `jepa_jax.projects.world_models`; states are positions. It depends on
    (data.seed, split, index) alone. Train and test have different layouts, which `data.seed` deals; a layout is a
    group, so that validation has others again. An action is repeated `data.frame_stride` times from frame to frame.
    """

    synthetic = True
    classes = ()
    element_names = ElementNames("walks", "layouts")
    targets = ("states",)

    def __init__(self, data: DataConfig, split: str):
        self._count = drawn_count(data, split)
        if data.image_size not in SIZES or data.channels != CHANNELS:
            raise UserError(
                f"config.data.image_size = {data.image_size}, data.channels = {data.channels}: two_rooms draws the dot "
                "and the walls in two channels of 33 or 65 pixels per side; set data.channels = 2 and one of these"
            )
        self._frames, self._stride, self._size = data.max_frames, data.frame_stride, data.image_size
        if not 2 <= self._frames or self._frames * self._stride > ACTIONS:
            raise UserError(
                f"config.data.max_frames = {self._frames}, data.frame_stride = {self._stride}: a walk has {ACTIONS} "
                "steps; use at least 2 frames, and fewer or a shorter stride"
            )
        self._stream = (data.seed, SPLIT_STREAMS[split])
        self._layouts = split_layouts(data.seed)[split]
        side = (self._frames, data.image_size, data.image_size, CHANNELS)
        self.spec = {
            "frames": jax.ShapeDtypeStruct(side, np.uint8),
            "actions": jax.ShapeDtypeStruct((self._frames, 2), np.float32),
            "states": jax.ShapeDtypeStruct((self._frames, 2), np.float32),
        }

    def __len__(self) -> int:
        return self._count

    @property
    def groups(self) -> np.ndarray:
        """The number in LAYOUTS of each element's layout."""
        return self._layouts[np.arange(self._count) % len(self._layouts)]

    def batch(self, indices: np.ndarray) -> Arrays:
        draws = np.stack([np.random.default_rng([*self._stream, int(i)]).random(DRAWS) for i in indices])
        layout = Layout(*(values[self._layouts[np.asarray(indices) % len(self._layouts)]] for values in LAYOUTS))
        positions, actions = walks(draws, layout, steps=ACTIONS // self._stride, stride=self._stride)
        first = (draws[:, 0] * (actions.shape[1] - self._frames + 1)).astype(int)
        window = first[:, None] + np.arange(self._frames)
        states, actions = (np.take_along_axis(a, window[..., None], 1).astype(np.float32) for a in (positions, actions))
        return {
            "frames": picture(states, Layout(*(values[:, None].astype(np.float32) for values in layout)), self._size),
            "actions": actions,
            "states": states,
        }


def split_layouts(seed: int) -> dict[str, np.ndarray]:
    """Returns the numbers in LAYOUTS of the layouts of each split; no layout is in both."""
    order = np.random.default_rng([seed, LAYOUT_STREAM]).permutation(len(LAYOUTS.wall))
    tests = round(TEST_LAYOUTS * len(order))
    return {"test": order[:tests], "train": order[tests:]}


_FEW = 8  # draws of a walk beside those of its actions
DRAWS = _FEW + 2 * ACTIONS


def walks(draws: np.ndarray, layout: Layout, *, steps: int, stride: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns positions [B, steps + 1, 2] and actions [B, steps, 2] of random walks.

    Args:
      draws: uniform numbers [B, DRAWS].
      layout: [B].
      steps: actions of a walk.
      stride: how often each action is repeated; the direction changes as much as it would in as many steps.
    """
    through = draws[:, 1] < THROUGH_DOOR
    lengths = truncated_normal(draws[:, _FEW : _FEW + steps], STEP_MEAN, STEP_STD, SHORTEST_STEP, LONGEST_STEP)
    turns = von_mises(draws[:, _FEW + ACTIONS :][:, : steps * stride]).reshape(len(draws), steps, stride).sum(-1)
    through_actions, arrival = _actions_through(draws, turns, lengths, layout, stride)
    free = np.cumsum(turns, axis=1) - turns[:, :1] + 2 * np.pi * draws[:, 2:3]
    actions = np.where(through[:, None, None], through_actions, _vectors(free, lengths))
    anywhere = LOW + (HIGH - LOW) * draws[:, 3:5]
    start = out_of_wall(np.where(through[:, None], arrival, anywhere), layout)
    positions = [start]
    for step in range(steps):
        position = positions[-1]
        for _ in range(stride):
            position = walked(position, actions[:, step], layout)
        positions.append(position)
    return np.stack(positions, 1), actions


def _actions_through(
    draws: np.ndarray, turns: np.ndarray, lengths: np.ndarray, layout: Layout, stride: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the actions [B, steps, 2] of walks that pass the door at a random step, and where they start.

    Two random walks leave the door, one to each side; the first is walked backwards.
    """
    steps = turns.shape[1]
    at = (draws[:, 5] * steps).astype(int)[:, None]  # the step that starts in the door
    after = np.arange(steps) >= at
    angle = WIDEST_ANGLE * (2 * draws[:, 6:7] - 1)
    total = np.cumsum(turns, axis=1)
    here = np.take_along_axis(total, np.minimum(at, steps - 1), axis=1)
    angles = angle + total - here  # both halves continue the direction in the door
    angles = np.where(draws[:, 7:8] < 0.5, angles, angles + np.pi)
    actions = _vectors(angles, lengths)
    height = truncated_normal(draws[:, 2], 0.0, DOOR_STD, -HALF_DOOR, HALF_DOOR)
    door = np.stack([layout.wall, layout.door + height], -1)
    start = door - stride * np.sum(np.where(after[..., None], 0, actions), axis=1)
    return actions, np.clip(start, LOW, HIGH)


def _vectors(angles: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    return np.stack([np.cos(angles), np.sin(angles)], -1) * lengths[..., None]


def truncated_normal(uniform: np.ndarray, mean: float, std: float, low: float, high: float) -> np.ndarray:
    """Returns normal numbers between two limits, by the inverse of their distribution."""
    ends = scipy.special.ndtr((np.array([low, high]) - mean) / std)
    return mean + std * scipy.special.ndtri(ends[0] + (ends[1] - ends[0]) * uniform)


def von_mises(uniform: np.ndarray) -> np.ndarray:
    """Returns angles around 0 of CONCENTRATION, by the inverse of their distribution."""
    return np.interp(uniform, *_von_mises_table())


@functools.cache
def _von_mises_table() -> tuple[np.ndarray, np.ndarray]:
    angles = np.linspace(-np.pi, np.pi, TABLE)
    return scipy.stats.vonmises.cdf(angles, CONCENTRATION), angles
