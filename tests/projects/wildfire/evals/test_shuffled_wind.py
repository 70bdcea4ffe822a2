"""The wind of other fires: whose it is, and how it fits a history."""

import numpy as np

from jepa_jax.data.sources import open_data
from jepa_jax.projects.wildfire.evals.next_mask import ShuffledWind, wind_donors
from jepa_jax.projects.wildfire.evals.predictor import same_shape_parts
from tests.projects.wildfire.evals.pixel_method import fire_config


def test_donors_are_a_permutation_among_other_fires():
    fires = np.array([3, 1, 1, 2, 3, 2, 1, 5, 4])
    others = wind_donors(fires)
    assert sorted(others) == list(range(9)) and (fires[others] != fires).all()
    np.testing.assert_array_equal(wind_donors(fires), others)


def test_shuffled_wind_fits_the_history_and_nothing_else_changes():
    test = open_data(fire_config().data).test
    for indices, part in same_shape_parts(test):
        fires = part.batch(np.arange(len(part)))["fire_id"]
        others = wind_donors(fires)
        own, other = part.batch(np.arange(len(part))), ShuffledWind(part, others).batch(np.arange(len(part)))
        assert {name for name in own if not np.array_equal(own[name], other[name])} == {"wind"}
        np.testing.assert_array_equal(other["wind"][~own["valid"]], 0)
        np.testing.assert_array_equal(other["wind"][:, -1], own["wind"][others, -1])
        assert len(indices) == len(part) and (other["wind"][own["valid"]][:, 0] > 0).all()  # no wind of padding


def test_a_longer_history_repeats_the_first_wind_of_a_shorter_one():
    class Two:
        spec, classes = {}, ()

        def batch(self, indices):
            wind = np.array([[[0, 0], [0, 0], [5, 6]], [[1, 1], [2, 2], [3, 3]]], np.float32)
            return {"wind": wind[indices], "valid": np.array([[0, 0, 1], [1, 1, 1]], bool)[indices]}

    wind = ShuffledWind(Two(), np.array([1, 0])).batch(np.arange(2))["wind"]
    np.testing.assert_array_equal(wind, [[[0, 0], [0, 0], [3, 3]], [[5, 6], [5, 6], [5, 6]]])
