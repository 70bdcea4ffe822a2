"""The rules of Two Rooms, against brute force over the points of a move."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jepa_jax.projects.world_models.control import two_rooms
from jepa_jax.projects.world_models.control.two_rooms import HIGH, LAYOUTS, LOW, Layout, RoomState, TwoRoomsEnvironment
from tests.projects.world_models.rooms import rooms_data

COUNT = 4000


def random_moves(seed: int, longest: float = 8.0) -> tuple[np.ndarray, np.ndarray, Layout]:
    """Returns free positions, half of them near the door, moves, and layouts."""
    rng = np.random.default_rng(seed)
    layout = Layout(*(values[rng.integers(len(LAYOUTS.wall), size=COUNT)] for values in LAYOUTS))
    near = np.stack(layout, -1) + rng.uniform(-6, 6, (COUNT, 2))
    anywhere = rng.uniform(LOW, HIGH, (COUNT, 2))
    position = np.where(np.arange(COUNT)[:, None] < COUNT // 2, near, anywhere)
    position = np.clip(two_rooms.out_of_wall(position, layout), LOW + 0.01, HIGH - 0.01)
    return position, rng.uniform(-longest, longest, (COUNT, 2)), layout


def solid(points: np.ndarray, layout: Layout) -> np.ndarray:
    """Returns whether points [N, P, 2] lie in the wall or outside of the room."""
    x, y = points[..., 0] - layout.wall[:, None], points[..., 1] - layout.door[:, None]
    outside = ((points < LOW) | (points > HIGH)).any(-1)
    return outside | ((abs(x) < two_rooms.HALF_WALL) & (abs(y) > two_rooms.HALF_DOOR))


def along(position: np.ndarray, move: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    shares = np.linspace(0, 1, 1001)
    return shares, position[:, None] + shares[:, None] * move[:, None]


def test_a_move_hits_where_its_first_solid_point_is() -> None:
    position, move, layout = random_moves(0)
    shares, points = along(position, move)
    blocked = solid(points, layout)
    found, back = two_rooms.first_hit(position, move, layout)
    first = shares[np.argmax(blocked, axis=1)]
    hit = blocked.any(1)
    assert hit.mean() > 0.2 and (~hit).mean() > 0.2
    np.testing.assert_allclose(found[hit], first[hit], atol=0.0011)
    assert (found[~hit] > 1).mean() > 0.995  # the rest cut off a corner between two points
    np.testing.assert_allclose(np.linalg.norm(back[hit], axis=-1), 1)
    assert (np.sum(back * move, axis=-1)[hit] < 0).all()


def test_a_walk_through_something_does_not_happen() -> None:
    position, move, layout = random_moves(1)
    after = two_rooms.walked(position, move, layout)
    hit = solid(along(position, move)[1], layout).any(1)
    np.testing.assert_array_equal(after[hit], position[hit])
    moved = (after != position).any(-1)
    np.testing.assert_array_equal(after[moved], (position + move)[moved])
    assert moved[~hit].mean() > 0.995


def test_a_bounce_ends_inside_and_away_from_what_it_hit() -> None:
    position, move, layout = random_moves(2, longest=1.8)
    noise = np.random.default_rng(3).standard_normal(COUNT)
    after = two_rooms.bounced(position, move, layout, noise)
    hit = two_rooms.first_hit(position, move, layout)[0] <= 1
    assert not solid(after[:, None], layout).any()
    share, back = two_rooms.first_hit(position, move, layout)
    share = np.where(hit, share, 0)
    depth = np.sum((after - position - share[:, None] * move)[hit] * back[hit], axis=-1)
    inside = ((after > LOW + 0.31) & (after < HIGH - 0.31)).all(-1)[hit]
    np.testing.assert_allclose(depth[inside], np.maximum(0.3, 0.5 * abs(noise[hit]))[inside], atol=1e-9)
    np.testing.assert_array_equal(after[~hit], (position + move)[~hit])


def test_numpy_and_jax_agree() -> None:
    position, move, layout = random_moves(4)
    with jax.enable_x64():
        on_device = jax.jit(two_rooms.walked)(*jax.tree.map(jnp.asarray, (position, move, layout)))
    np.testing.assert_allclose(on_device, two_rooms.walked(position, move, layout), rtol=1e-12)


def test_pictures_have_the_published_statistics() -> None:
    walls = two_rooms.wall_picture(LAYOUTS, 65) / 255
    assert round(float(walls.mean()), 4) == 0.0989 and round(float(walls.std()), 4) == 0.2986
    layout = Layout(np.float64(32), np.float64(18))
    dot = two_rooms.picture(np.array([20.0, 40.0]), layout, 65)[..., 0]
    rows, columns = np.indices((65, 65))
    np.testing.assert_array_equal(dot, np.round(255 * np.exp(-((rows - 40) ** 2 + (columns - 20) ** 2) / (2 * 1.3**2))))
    assert (walls[two_rooms_index(32, 18)][:, 31:34].sum(1)[[9, 13, 14, 18, 22, 23]] == [3, 3, 0, 0, 0, 3]).all()


def two_rooms_index(wall: int, door: int) -> int:
    return int(np.flatnonzero((LAYOUTS.wall == wall) & (LAYOUTS.door == door))[0])


def test_half_the_pixels_show_the_same_walls() -> None:
    np.testing.assert_array_equal(two_rooms.wall_picture(LAYOUTS, 33), two_rooms.wall_picture(LAYOUTS, 65)[:, ::2, ::2])


def test_the_shortest_path_is_the_least_over_heights_in_the_door() -> None:
    environment = TwoRoomsEnvironment(rooms_data(), None)
    starts, goals = jax.jit(jax.vmap(environment.task))(jax.random.split(jax.random.key(0), 64))
    found = jax.jit(jax.vmap(environment.shortest_path))(starts, goals)
    (start, layout), (goal, _) = jax.tree.map(np.asarray, (starts, goals))
    side = np.sign(goal[:, 0] - layout.wall)
    heights = layout.door[:, None] + np.linspace(-4, 4, 81)  # [N, 81]

    def way(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return np.hypot(*np.moveaxis(a - b, -1, 0))

    enter = np.stack([np.broadcast_to((layout.wall - side)[:, None], heights.shape), heights], -1)
    leave = np.stack([np.broadcast_to((layout.wall + side)[:, None], heights.shape), heights], -1)
    total = (
        way(start[:, None], enter)[:, :, None]
        + way(enter[:, :, None], leave[:, None])
        + way(leave, goal[:, None])[:, None]
    )
    np.testing.assert_allclose(found, total.min((1, 2)), atol=2e-3)


def test_tasks_are_in_different_rooms_away_from_walls_and_in_the_groups_alone() -> None:
    environment = TwoRoomsEnvironment(rooms_data(), np.array([3, 500]))
    starts, goals = jax.jit(jax.vmap(environment.task))(jax.random.split(jax.random.key(1), 500))
    wall = np.asarray(starts.layout.wall)
    assert set(wall.tolist()) == set(LAYOUTS.wall[[3, 500]].tolist())
    x = np.stack([starts.position[:, 0], goals.position[:, 0]])
    assert ((x[0] < wall) != (x[1] < wall)).all() and abs(np.mean(x[0] < wall) - 0.5) < 0.1
    assert (abs(x - wall) >= 3.6).all()
    for states in (starts, goals):
        assert (states.position >= 6.6).all() and (states.position <= 57.4).all()


def test_an_action_is_repeated_as_often_as_the_stride_says() -> None:
    environment = TwoRoomsEnvironment(rooms_data(frame_stride=4), None)
    state = RoomState(jnp.array([10.0, 30.0]), Layout(jnp.float32(32), jnp.float32(18)))
    after = jax.jit(environment.step)(state, jnp.array([1.5, -1.0]), jax.random.key(0))
    np.testing.assert_allclose(after.position, [16, 26], rtol=1e-6)
    assert environment.steps == 50


@pytest.mark.parametrize("size", [33, 65])
def test_frames_of_states_are_pictures(size: int) -> None:
    environment = TwoRoomsEnvironment(rooms_data(image_size=size), None)
    state, _ = jax.jit(environment.task)(jax.random.key(2))
    drawn = two_rooms.picture(*jax.tree.map(np.asarray, (state.position, state.layout)), size)
    assert np.abs(np.asarray(jax.jit(environment.frame)(state), int) - drawn).max() <= 1
