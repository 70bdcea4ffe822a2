"""The simulated fires: reproducible, split by fire, about 5 % burning, and driven by the wind."""

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jepa_jax.base.errors import UserError
from jepa_jax.config.groups import DataConfig
from jepa_jax.data.contract import abstract_batch
from jepa_jax.data.sources import open_source, open_splits
from jepa_jax.projects.wildfire.data import simulated as wildfire
from jepa_jax.projects.wildfire.data import simulator
from jepa_jax.projects.wildfire.data.simulated import SEQUENCES_PER_FIRE


def opened(split="train", **keys):
    return open_source(DataConfig(**dict(source="wildfire", image_size=16, num_train=64, num_test=64) | keys), split)


def assert_same(batch, other):
    assert set(batch) == set(other)
    for key in batch:
        np.testing.assert_array_equal(batch[key], other[key], err_msg=key)


@settings(max_examples=8)
@given(
    seed=st.integers(0, 2**31),
    indices=st.lists(st.integers(0, 63), min_size=1, max_size=3),
    split=st.sampled_from(["train", "test"]),
)
def test_an_element_depends_on_seed_split_and_index_alone(seed, indices, split):
    source = opened(split, seed=seed)
    batch = source.batch(np.array(indices))
    assert {key: (a.shape, a.dtype) for key, a in batch.items()} == {
        key: (one.shape, one.dtype) for key, one in abstract_batch(source.spec, len(indices)).items()
    }
    for place, index in enumerate(indices):
        one = pickle.loads(pickle.dumps(source)).batch(np.array([index]))
        assert_same({key: array[place : place + 1] for key, array in batch.items()}, one)


def test_padding_comes_first_and_a_smaller_cap_keeps_the_last_frames():
    long, short = opened().batch(np.arange(64)), opened(max_frames=5).batch(np.arange(64))
    lengths = long["valid"].sum(1)
    assert lengths.min() == 2 and 6 < lengths.max() <= 20 and np.mean(lengths <= 6) > 0.5
    assert (np.sort(long["valid"], 1) == long["valid"]).all()
    assert not long["fire"][~long["valid"]].any() and not long["wind"][~long["valid"]].any()
    for key in long:
        np.testing.assert_array_equal(long[key][:, -5:] if key in ("fire", "wind", "valid") else long[key], short[key])


def test_masks_only_grow_into_the_target():
    batch = opened(image_size=32).batch(np.arange(64))
    masks = np.concatenate([batch["fire"], batch["target"][:, None]], 1)
    assert (masks[:, 1:] >= masks[:, :-1]).all()
    assert batch["known"].all() and (batch["target"] & ~batch["fire"][:, -1]).any((1, 2, 3)).mean() > 0.6
    assert all(batch[key].min() >= 0 and batch[key].max() <= 1 for key in ("static", "wind"))


def test_splits_and_seeds_share_no_fire():
    train, test = open_splits(DataConfig(source="wildfire", image_size=16, num_train=64, num_test=64))
    grounds = [set(map(bytes, source.batch(np.arange(64))["static"])) for source in (train, test, opened(seed=1))]
    assert [len(ground) for ground in grounds] == [64 // SEQUENCES_PER_FIRE] * 3 and len(set.union(*grounds)) == 48
    batch = train.batch(np.arange(64))
    assert len(set(zip(map(bytes, batch["static"]), batch["fire_id"].tolist(), strict=True))) == 16


@pytest.mark.parametrize("size", [32, 48])
def test_about_one_pixel_in_twenty_burns(size):
    batch = opened(image_size=size, num_train=160).batch(np.arange(160))
    assert 0.03 < batch["fire"][batch["valid"]].mean() < 0.07


def flat(size, fuel=1.0):
    return simulator.ground_factors(np.full((size, size), fuel), np.zeros((size, size)))


@given(direction=st.floats(0, 1), speed=st.floats(0, 1), fuel=st.floats(0, 1))
def test_probability_of_one_burning_cell_is_the_closed_form(direction, speed, fuel):
    burning = np.zeros((3, 3), bool)
    burning[1, 1] = True
    p = simulator.ignition_probability(
        burning, simulator.spread_probabilities(flat(3, fuel), np.array([speed, direction]))
    )
    for (row, column), north_east in {(0, 1): (1, 0), (1, 2): (0, 1), (2, 2): (-1, 1), (2, 0): (-1, -1)}.items():
        length = np.hypot(*north_east)
        heading = 2 * np.pi * direction + np.pi  # clockwise from north, where the wind blows to
        cosine = (north_east[0] * np.cos(heading) + north_east[1] * np.sin(heading)) / length
        expected = simulator.RATE / length * fuel * np.exp(simulator.WIND_GAIN * speed * cosine)
        np.testing.assert_allclose(p[row, column], min(1, expected), rtol=1e-9, atol=1e-12)
    assert p[1, 1] == 0


def test_fire_climbs_and_stops_at_barren_ground():
    size, burning = 5, np.zeros((5, 5), bool)
    burning[2, 2] = True
    uphill_east = np.tile(np.linspace(0, 1, size), (size, 1))
    fuel = np.ones((size, size))
    fuel[1, 2] = 0
    calm = np.zeros(2)
    p = simulator.ignition_probability(
        burning, simulator.spread_probabilities(simulator.ground_factors(fuel, uphill_east), calm)
    )
    ratio = np.exp(2 * simulator.SLOPE_GAIN * size / (size - 1))
    np.testing.assert_allclose(p[2, 3] / p[2, 1], ratio)
    assert p[1, 2] == 0 < p[3, 2]


def test_fires_move_with_the_wind():
    """New pixels of a frame lie downwind of the burning ones in nearly every fire."""
    batch = opened(image_size=32, num_train=128).batch(np.arange(128))
    rows = np.indices((32, 32))
    shift, heading = [], []
    for fire, target, wind in zip(
        batch["fire"][:, -1, ..., 0], batch["target"][..., 0], batch["wind"][:, -1], strict=True
    ):
        new = target & ~fire
        if new.sum() >= 5:
            shift.append(rows[:, new].mean(1) - rows[:, fire].mean(1))
            angle = 2 * np.pi * wind[1]
            heading.append((np.cos(angle), -np.sin(angle)))  # from the north: southwards, down the rows
    along = np.sum(np.array(shift) * heading, 1)
    assert len(along) > 30 and np.mean(along > 0) > 0.8 and along.mean() > 1


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (dict(num_train=0), "data.num_train = 0"),
        (dict(image_size=8), "data.image_size = 8: .*16"),
        (dict(channels=1), "set data.channels = 3"),
    ],
)
def test_what_cannot_be_simulated_is_refused(keys, message):
    with pytest.raises(UserError, match=message):
        opened(**keys)


def test_memory_is_taken_at_once_and_fires_are_simulated_once(monkeypatch):
    source, calls = opened(), []
    simulate = wildfire.simulate_fire
    monkeypatch.setattr(wildfire, "simulate_fire", lambda rng, size: calls.append(size) or simulate(rng, size))
    first = source.batch(np.arange(8))
    held = [values.nbytes for values in vars(source._memory).values()]
    assert_same(source.batch(np.arange(8)), first)
    source.batch(np.arange(64))
    assert len(calls) == 64 // SEQUENCES_PER_FIRE
    assert [values.nbytes for values in vars(source._memory).values()] == held
