"""Predictions for whole sources: order, buckets, devices, and the wind of other fires."""

import numpy as np
import pytest

from jepa_jax.base.errors import UserError
from jepa_jax.projects.wildfire.evals.predictions import LentWind, MaskPredictor, lenders, same_shape_parts
from tests.projects.wildfire.evals.pixel_method import context_of, fire_config
from tests.stepping import mesh_of
from tests.tiny import tiny_config


class Padded:
    """A source without its buckets: every history is padded to the longest."""

    classes = ()

    def __init__(self, source):
        self._source, self.spec, self.batch = source, source.spec, source.batch

    def __len__(self):
        return len(self._source)


@pytest.fixture(scope="module")
def built():
    return context_of(fire_config())


def test_buckets_change_no_prediction_and_cost_one_compilation_each(built):
    context, state = built
    predict, variables = MaskPredictor(context.config, context.program), context.calibrated(state, 0)
    assert set(context.test.buckets) == {0, 1}
    in_buckets = list(predict(*variables, context.test))
    assert {prediction.delivered["fire"].shape[1] for prediction in in_buckets} == {4, 12}
    predict.scores(*variables, context.validation)
    assert predict._logits._cache_size() == 2
    padded = predict.scores(*variables, Padded(context.test))
    np.testing.assert_allclose(predict.scores(*variables, context.test), padded, rtol=1e-5, atol=1e-6)
    assert len(np.unique(padded.reshape(len(padded), -1), axis=0)) > 20  # an order is there to get wrong


def test_each_element_is_predicted_once_and_comes_with_its_own_batch(built):
    context, state = built
    seen, counted = [], []
    predict, variables = MaskPredictor(context.config, context.program), context.calibrated(state, 0)
    for indices, logits, delivered in predict(*variables, context.test, on_elements=counted.append):
        assert logits.shape == (len(indices), 16, 16) and logits.dtype == np.float32
        assert len(delivered["fire"]) == 8  # one shape, also for the last elements of a bucket
        seen += indices.tolist()
    assert sorted(seen) == list(range(24)) == list(range(sum(counted)))
    prediction = next(predict(*variables, context.test))
    own = context.test.batch(prediction.indices)
    for name in ("target", "fire_id", "static"):
        np.testing.assert_array_equal(prediction.batch[name], own[name])
    np.testing.assert_allclose(prediction.probabilities, 1 / (1 + np.exp(-prediction.logits)), rtol=1e-5)


def test_one_and_eight_devices_predict_the_same(built):
    context, state = built
    one = MaskPredictor(context.config, context.program).scores(*context.calibrated(state, 0), context.test)
    context, state = context_of(fire_config(), mesh_of(8))
    eight = MaskPredictor(context.config, context.program).scores(*context.calibrated(state, 0), context.test)
    np.testing.assert_allclose(one, eight, rtol=1e-5, atol=1e-6)


def test_a_method_without_masks_is_refused():
    config = tiny_config()
    context, _ = context_of(config)
    with pytest.raises(UserError, match="method.name = 'image_jepa'.*predict"):
        MaskPredictor(config, context.program)


def test_lenders_are_a_permutation_among_other_fires():
    fires = np.array([3, 1, 1, 2, 3, 2, 1, 5, 4])
    others = lenders(fires)
    assert sorted(others) == list(range(9)) and (fires[others] != fires).all()
    np.testing.assert_array_equal(lenders(fires), others)


def test_lent_wind_fits_the_history_and_nothing_else_changes(built):
    context, _ = built
    for indices, part in same_shape_parts(context.test):
        fires = part.batch(np.arange(len(part)))["fire_id"]
        others = lenders(fires)
        own, other = part.batch(np.arange(len(part))), LentWind(part, others).batch(np.arange(len(part)))
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

    lent = LentWind(Two(), np.array([1, 0])).batch(np.arange(2))["wind"]
    np.testing.assert_array_equal(lent, [[[0, 0], [0, 0], [3, 3]], [[5, 6], [5, 6], [5, 6]]])
