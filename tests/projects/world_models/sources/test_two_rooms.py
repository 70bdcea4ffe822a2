import numpy as np
import pytest

from jepa_jax.base.errors import UserError
from jepa_jax.data.sources import open_data
from jepa_jax.projects.world_models.control.two_rooms import LAYOUTS, Layout, picture, walked
from jepa_jax.projects.world_models.sources import two_rooms
from jepa_jax.projects.world_models.sources.two_rooms import TwoRooms
from tests.projects.world_models.rooms import rooms_data


def test_actions_lead_from_frame_to_frame() -> None:
    source = TwoRooms(rooms_data(), "train")
    batch = source.batch(np.arange(64))
    layout = Layout(*(values[source.groups[:64]].astype(np.float32) for values in LAYOUTS))
    for t in range(4):
        position = batch["states"][:, t]
        for _ in range(4):
            position = walked(position, batch["actions"][:, t], layout)
        np.testing.assert_allclose(position, batch["states"][:, t + 1], atol=1e-3)
    shown = picture(batch["states"], Layout(*(values[:, None] for values in layout)), 33)
    np.testing.assert_array_equal(batch["frames"], shown)


def test_an_element_depends_on_seed_split_and_index_alone() -> None:
    source = TwoRooms(rooms_data(), "train")
    together, alone = (
        source.batch(np.array([3, 7, 11])),
        TwoRooms(rooms_data(num_train=999), "train").batch(np.array([7])),
    )
    for name, array in alone.items():
        np.testing.assert_array_equal(array[0], together[name][1])
    for other in (TwoRooms(rooms_data(), "test"), TwoRooms(rooms_data(seed=1), "train")):
        assert not np.array_equal(other.batch(np.array([7]))["states"], alone["states"])


def test_no_layout_is_in_two_splits() -> None:
    splits = open_data(rooms_data(num_train=4096, num_test=512, validation=0.1))
    layouts = [set(part.groups.tolist()) for part in splits]  # type: ignore[union-attr]
    assert sum(map(len, layouts)) == len(set.union(*layouts)) == len(LAYOUTS.wall)
    assert len(layouts[1]) == round(0.1 * len(LAYOUTS.wall))


def test_steps_and_turns_follow_their_distributions() -> None:
    uniform = (np.arange(10_000) + 0.5) / 10_000
    lengths = two_rooms.truncated_normal(uniform, 1.0, 0.4, 0.2, 1.8)
    assert lengths.min() >= 0.2 and lengths.max() <= 1.8 and abs(lengths.mean() - 1) < 1e-6
    turns = two_rooms.von_mises(uniform)
    assert abs(np.mean(np.cos(turns)) - 0.8934) < 1e-3  # I1(5) / I0(5)


def test_a_share_of_walks_is_made_to_pass_the_door() -> None:
    draws = np.random.default_rng(0).random((2000, two_rooms.DRAWS))
    layout = Layout(*(values[np.random.default_rng(1).integers(len(LAYOUTS.wall), size=2000)] for values in LAYOUTS))
    positions, actions = two_rooms.walks(draws, layout, steps=90, stride=1)
    right = positions[..., 0] > layout.wall[:, None]
    crosses = right.any(1) & (~right).any(1)
    made = draws[:, 1] < 0.35
    assert abs(made.mean() - 0.35) < 0.03
    assert crosses[made].mean() > 3 * crosses[~made].mean()
    assert np.linalg.norm(actions, axis=-1).max() <= 1.8


@pytest.mark.parametrize(
    ("changes", "named"),
    [({"image_size": 32}, "image_size"), ({"num_train": 0}, "num_train"), ({"max_frames": 40}, "max_frames")],
)
def test_what_cannot_be_is_named(changes: dict, named: str) -> None:
    with pytest.raises(UserError, match=named):
        TwoRooms(rooms_data(**changes), "train")
