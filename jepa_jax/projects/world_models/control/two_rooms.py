"""Two Rooms: a dot in a square that a wall with a door divides; its rules as pure functions, and as an environment.

Lengths are units of the room, which is 64 wide; positions are (x, y). The functions take arrays of numpy or of jax with
any leading axes. Reference: Sobal et al., "Learning from Reward-Free Offline Data: A Case for Planning with Latent
Dynamics Models", 2025.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jepa_jax.config.groups import DataConfig

WIDTH = 64.0  # of the picture: from the centre of its first pixel to that of its last
LOW, HIGH = 4.0, 60.0  # border lines, in both directions
HALF_WALL, HALF_DOOR = 1.0, 4.0
WALLS, DOORS = (20, 44), (10, 54)  # where they may be, both ends included
DOT = 1.3  # standard deviation of the dot in pixels
BOUNCE, LEAST_BOUNCE = 0.5, 0.3  # distance from what was hit: standard deviation and least
CLEARANCE = 2.6  # of starts and goals from all walls
LONGEST_STEP = 1.8
SUCCESS_DISTANCE = 4.5
EPISODE_STEPS = 200

Array = Any  # of numpy or jax


class Layout(NamedTuple):
    """Where the wall is (x), and where the middle of its door is (y)."""

    wall: Array
    door: Array


LAYOUTS = Layout(*(grid.ravel() for grid in np.meshgrid(
    np.arange(WALLS[0], WALLS[1] + 1.0), np.arange(DOORS[0], DOORS[1] + 1.0), indexing="ij"
)))  # fmt: skip


def first_hit(position: Array, move: Array, layout: Layout) -> tuple[Array, Array]:
    """Returns after which share of a move a border or the wall is hit, inf if it is not, and the way back from there.

    Args:
      position, move: [..., 2].
      layout: [...].

    Returns:
      The share [...], and the unit vector [..., 2] that points away from what was hit.
    """
    xp = position.__array_namespace__()
    hits = xp.stack([*_border_hits(position, move), *_wall_hits(position, move, layout)], -1)  # what stops x, y, x, y
    earliest = xp.min(hits, -1)
    stops_x = (xp.argmin(hits, -1) % 2 == 0)[..., None]
    axis = xp.where(stops_x, xp.asarray([1.0, 0.0]), xp.asarray([0.0, 1.0]))
    return xp.where(earliest <= 1, earliest, xp.inf), -xp.sign(move) * axis


def _border_hits(position: Array, move: Array) -> tuple[Array, Array]:
    """Returns the shares of a move after which a border is hit that stops x, or y."""
    xp = position.__array_namespace__()
    border = _share(xp.where(move > 0, HIGH, LOW) - position, move)  # [..., 2]
    return border[..., 0], border[..., 1]


def _wall_hits(position: Array, move: Array, layout: Layout) -> tuple[Array, Array]:
    """Returns the shares of a move after which a side of the wall, or a jamb of its door, is hit; inf for neither."""
    xp = position.__array_namespace__()
    x, y = position[..., 0] - layout.wall, position[..., 1] - layout.door
    dx, dy = move[..., 0], move[..., 1]
    inside = abs(x) < HALF_WALL
    enters = xp.where(inside, 0.0, _share(-xp.sign(dx) * HALF_WALL - x, dx))
    enters = xp.where(~inside & (x * dx > 0), xp.inf, enters)  # it moves away
    leaves = xp.where(dx == 0, xp.inf, _share(xp.sign(dx) * HALF_WALL - x, dx))
    meets = enters < xp.minimum(leaves, 1.0)
    height = y + xp.where(meets, enters, 0.0) * dy
    side = meets & ~inside & (abs(height) > HALF_DOOR)
    jamb = _share(xp.sign(dy) * HALF_DOOR - y, dy)
    hits_jamb = meets & ~side & (jamb < leaves)
    return xp.where(side, enters, xp.inf), xp.where(hits_jamb, jamb, xp.inf)


def _share(way: Array, move: Array) -> Array:
    """Returns way / move; inf without a move."""
    xp = move.__array_namespace__()
    return xp.where(move == 0, xp.inf, way / xp.where(move == 0, 1.0, move))


def walked(position: Array, move: Array, layout: Layout) -> Array:
    """Returns positions [..., 2] after moves, where one that would hit something does not happen."""
    xp = position.__array_namespace__()
    hits = (*_border_hits(position, move), *_wall_hits(position, move, layout))
    free = functools.reduce(xp.minimum, hits) > 1
    return xp.where(free[..., None], position + move, position)


def bounced(position: Array, move: Array, layout: Layout, noise: Array) -> Array:
    """Returns positions [..., 2] after moves, where one that hits something ends there, a little away from it.

    Args:
      noise: standard normal [...]; the distance is BOUNCE times its size, at least LEAST_BOUNCE.
    """
    xp = position.__array_namespace__()
    share, back = first_hit(position, move, layout)
    hit = (share <= 1)[..., None]
    distance = xp.maximum(LEAST_BOUNCE, BOUNCE * abs(noise))[..., None]
    end = position + xp.where(hit, share[..., None], 1.0) * move
    return xp.where(hit, xp.clip(end + distance * back, LOW + LEAST_BOUNCE, HIGH - LEAST_BOUNCE), end)


def out_of_wall(position: Array, layout: Layout) -> Array:
    """Returns positions that lay inside the wall, its door not counted, just beside it; others as they are."""
    xp = position.__array_namespace__()
    x, y = position[..., 0] - layout.wall, position[..., 1] - layout.door
    buried = (abs(x) <= HALF_WALL) & (abs(y) >= HALF_DOOR)
    beside = xp.where(x < 0, -1.0, 1.0) * (HALF_WALL + LEAST_BOUNCE)
    return xp.stack([layout.wall + xp.where(buried, beside, x), position[..., 1]], -1)


def picture(position: Array, layout: Layout, size: int) -> Array:
    """Returns pictures uint8 [..., size, size, 2] of the dot and of the walls; rows are y, columns x.

    65 pixels are one per unit; 33 show every second of them. The dot has the same width in pixels.
    """
    xp = position.__array_namespace__()
    pixels = xp.arange(size, dtype=np.float32)
    scale = (size - 1) / WIDTH
    profile = xp.exp(-((pixels - position[..., None] * scale) ** 2) / (2 * DOT**2))  # [..., 2, size]
    dot = 255 * profile[..., 1, :, None] * profile[..., 0, None, :] + 0.5
    walls = xp.broadcast_to(wall_picture(layout, size), dot.shape)
    return xp.stack([dot.astype(np.uint8), walls], -1)


def wall_picture(layout: Layout, size: int) -> Array:
    """Returns pictures uint8 [..., size, size] of border, wall and door: 0 or 255."""
    xp = layout.wall.__array_namespace__()
    units = xp.arange(size, dtype=np.float32) * (WIDTH / (size - 1))
    border = (units == LOW) | (units == HIGH)
    wall = abs(units - layout.wall[..., None]) <= HALF_WALL  # [..., columns]
    door = abs(units - layout.door[..., None]) <= HALF_DOOR  # [..., rows]
    solid = (wall[..., None, :] & ~door[..., :, None]) | border[:, None] | border[None, :]
    return xp.where(solid, 255, 0).astype(np.uint8)


def shortest_path(start: Array, goal: Array, layout: Layout) -> Array:
    """Returns the length [...] of the shortest way between positions in different rooms; else the distance.

    The way enters and leaves the door at two heights. Each is best where the straight line past the other one goes
    through, or at the jamb; alternating between them converges, since the length is convex.
    """
    xp = start.__array_namespace__()
    apart = (start[..., 0] - layout.wall) * (goal[..., 0] - layout.wall) < 0
    faces = layout.wall[..., None] + xp.sign(goal[..., :1] - layout.wall[..., None]) * xp.asarray(
        [-HALF_WALL, HALF_WALL]
    )
    low, high = layout.door - HALF_DOOR, layout.door + HALF_DOOR
    enter = leave = layout.door

    def crossing(here: Array, there: tuple[Array, Array], face: Array) -> Array:
        """Returns the height at which the line between two points goes through a face of the wall."""
        run = there[0] - here[..., 0]
        slope = (there[1] - here[..., 1]) / xp.where(run == 0, 1.0, run)
        return xp.clip(here[..., 1] + slope * (face - here[..., 0]), low, high)

    for _ in range(32):
        enter = crossing(start, (faces[..., 1], leave), faces[..., 0])
        leave = crossing(goal, (faces[..., 0], enter), faces[..., 1])
    points = [start, xp.stack([faces[..., 0], enter], -1), xp.stack([faces[..., 1], leave], -1), goal]
    length = sum(_norm(b - a) for a, b in zip(points[:-1], points[1:], strict=True))
    return xp.where(apart, length, _norm(goal - start))


def _norm(x: Array) -> Array:
    return (x**2).sum(-1) ** 0.5


class RoomState(NamedTuple):
    """Position [2] of the dot in a layout."""

    position: jax.Array
    layout: Layout


class TwoRoomsEnvironment:
    """See `environment.Environment` and `environment.Charted`; an action is a move, repeated `data.frame_stride` times.

    Starts and goals lie in different rooms, at least CLEARANCE from all walls.
    """

    action_width, longest_action, success_distance = 2, LONGEST_STEP, SUCCESS_DISTANCE
    bounds, extent = (LOW, HIGH), (0.0, WIDTH)

    def __init__(self, data: DataConfig, groups: np.ndarray | None):
        self._size, self._stride = data.image_size, data.frame_stride
        self._layouts = np.arange(len(LAYOUTS.wall)) if groups is None else np.unique(groups)
        self.steps = -(-EPISODE_STEPS // data.frame_stride)

    def task(self, key: jax.Array) -> tuple[RoomState, RoomState]:
        pick, swap, *places = jax.random.split(key, 4)
        number = jax.random.choice(pick, jnp.asarray(self._layouts))
        layout = Layout(*(jnp.asarray(values, jnp.float32)[number] for values in LAYOUTS))
        away = HALF_WALL + CLEARANCE
        lows = (LOW + CLEARANCE, layout.wall + away)
        highs = (layout.wall - away, HIGH - CLEARANCE)
        left, right = (
            RoomState(
                jax.random.uniform(
                    place, (2,), minval=jnp.stack([low, LOW + CLEARANCE]), maxval=jnp.stack([high, HIGH - CLEARANCE])
                ),
                layout,
            )
            for place, low, high in zip(places, lows, highs, strict=True)
        )
        swapped = jax.random.bernoulli(swap)
        start, goal = (
            jax.tree.map(lambda a, b: jnp.where(swapped, a, b), one, other)
            for one, other in ((right, left), (left, right))
        )
        return start, goal

    def step(self, state: RoomState, action: jax.Array, key: jax.Array) -> RoomState:
        position = state.position
        for noise in jax.random.normal(key, (self._stride,)):
            position = bounced(position, action, state.layout, noise)
        return RoomState(position, state.layout)

    def frame(self, state: RoomState) -> jax.Array:
        return picture(state.position, state.layout, self._size)

    def distance(self, state: RoomState, goal: RoomState) -> jax.Array:
        return _norm(state.position - goal.position)

    def position(self, state: RoomState) -> jax.Array:
        return state.position

    def moved(self, state: RoomState, position: jax.Array) -> RoomState:
        return RoomState(position, state.layout)

    def straight(self, state: RoomState, goal: RoomState) -> jax.Array:
        return (goal.position - state.position) / self._stride

    def shortest_path(self, start: RoomState, goal: RoomState) -> jax.Array:
        return shortest_path(start.position, goal.position, start.layout)
